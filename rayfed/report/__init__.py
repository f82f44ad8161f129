"""Tables, figures, pages and analyses of finished runs."""
