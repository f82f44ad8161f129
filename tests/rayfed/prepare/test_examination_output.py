"""The picture of `--plot`: what is drawn, and which files are never replaced."""

from PIL import Image


def test_plot_of_the_clients(run, root, tmp_path):
    picture = tmp_path / "clients.png"
    overrides = ("data.partition.clients_per_domain=2", "data.partition.scheme=by_domain")
    code, out, _ = run("pacs", "--root", str(root), "--plot", str(picture), *overrides)
    assert code == 0
    assert f"clients: {picture}" in out
    with Image.open(picture) as image:
        assert image.size[0] > 500
    code, _, err = run("pacs", "--root", str(root), "--plot", str(picture), "data.held_out=fotos")
    assert code == 2
    assert "did you mean 'photo'" in err


def test_plot_replaces_its_own_picture_and_no_other_file(run, root, tmp_path):
    overrides = ("data.partition.clients_per_domain=2", "data.partition.scheme=by_domain")
    picture = tmp_path / "clients.png"
    for _ in range(2):
        assert run("pacs", "--root", str(root), "--plot", str(picture), *overrides)[0] == 0
    for name, words in (
        ("data.csv", "must end in .png"),
        ("mine.png", "was not written by this command"),
    ):
        (tmp_path / name).write_text("mine")
        code, _, err = run("pacs", "--root", str(root), "--plot", str(tmp_path / name))
        assert code == 2
        assert words in err
        assert (tmp_path / name).read_text() == "mine"
    code, _, err = run("pacs", "--root", str(root), "--plot", str(tmp_path / "nosuch" / "x.png"))
    assert code == 2
    assert "--plot: there is no folder" in err
