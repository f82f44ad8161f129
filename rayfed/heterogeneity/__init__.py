"""How clients differ on purpose: how much of the model they hold, and when they fail."""
