"""The scripts of examples/ learn what they are made to learn."""

from examples import vit


def test_the_vision_transformer_learns_in_a_loop_of_its_own(capsys):
    assert vit.main(steps=40, rows=16) > 0.5
    assert "step 40: loss" in capsys.readouterr().out
