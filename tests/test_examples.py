"""The scripts of examples/ learn what they are made to learn."""

from examples import dataloaders, vit


def test_the_vision_transformer_learns_in_a_loop_of_its_own(capsys):
    assert vit.main(steps=40, rows=16) > 0.5
    assert "step 40: loss" in capsys.readouterr().out


def test_batches_of_a_dataloader_are_trained_on_once_also_after_a_restart(tmp_path, capsys):
    whole = dataloaders.main(tmp_path / "whole", 40, num_workers=0)
    first = dataloaders.main(tmp_path / "parts", 20, num_workers=0)
    assert dataloaders.main(tmp_path / "parts", 40, num_workers=0) == whole < first
    assert capsys.readouterr().out.count("step 40: loss") == 2


def test_processes_read_other_rows_of_one_global_batch():
    half = dataloaders.ROWS // 2
    parts = [iter(dataloaders.Batches(256, range(start, start + half), done=3)) for start in (0, half)]
    whole = iter(dataloaders.Batches(256, range(2 * half), done=3))
    for _ in range(3):  # the last of a pass, and two of the next
        assert [*next(parts[0]), *next(parts[1])] == next(whole)
