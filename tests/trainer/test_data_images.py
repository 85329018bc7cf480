"""Images: where they come from, their split, order and shares, and a state that restores the stream bit for bit."""

import json
import subprocess
import sys

import numpy as np
import pytest

import jfsdp.trainer.data.images as data_images
from jfsdp.trainer.data import ImageConfig, make_image_eval_iterator, make_image_train_iterator, open_images

NUM_IMAGES = 12


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Twelve images of 2 x 3 x 1, each filled with its number, whose label is that number too."""
    path = tmp_path_factory.mktemp("images") / "numbered.npz"
    images = np.broadcast_to(np.arange(NUM_IMAGES, dtype=np.float64)[:, None, None, None], (NUM_IMAGES, 2, 3, 1))
    np.savez(path, images=images, labels=np.arange(NUM_IMAGES))
    return str(path)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def labels_of(batches):
    return np.concatenate([batch["labels"] for batch in batches]).tolist()


def assert_batches_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# ---- sources ----


def test_the_digits_of_scikit_learn_are_images_from_0_to_1():
    data = open_images(ImageConfig("digits", eval_fraction=0.2), shape=(8, 8, 1), num_classes=10)
    assert str(data) == "1797 images of 8 x 8 x 1 in 10 classes"
    assert (data.images.dtype, data.images.min(), data.images.max()) == (np.float32, 0, 1)
    assert (data.labels.dtype, len(data.train), len(data.eval)) == (np.int32, 1438, 359)


def test_bytes_of_a_file_are_given_out_from_0_to_1_and_other_numbers_as_they_are(tmp_path):
    np.savez(tmp_path / "bytes.npz", images=np.full((4, 2, 2, 3), 51, np.uint8), labels=np.arange(4))
    data = open_images(ImageConfig(str(tmp_path / "bytes.npz"), eval_fraction=0))
    batch = next(make_image_train_iterator(data, batch_size=2))
    assert data.images.dtype == np.uint8 and batch["images"].dtype == np.float32
    np.testing.assert_allclose(batch["images"], 0.2, rtol=1e-6)
    np.savez(tmp_path / "grey.npz", images=np.full((4, 2, 2), -7.0), labels=np.arange(4, dtype=np.uint8))
    data = open_images(ImageConfig(str(tmp_path / "grey.npz"), eval_fraction=0))
    batch = next(make_image_train_iterator(data, batch_size=2))
    assert batch["images"].shape == (2, 2, 2, 1) and (batch["images"] == -7).all()
    assert batch["labels"].dtype == np.int32


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((3, 2, 2))}, "not a .npz file with plain arrays images and labels"),
        (
            {"images": np.zeros((3, 2, 2)), "labels": np.zeros(2, int)},
            r"images \[3, 2, 2, 1\] and labels \[2\] are not",
        ),
        ({"images": np.zeros((3, 2)), "labels": np.zeros(3, int)}, r"images \[3, 2\] and labels \[3\] are not"),
        ({"images": np.zeros((0, 2, 2)), "labels": np.zeros(0, int)}, "with N at least 1"),
        ({"images": np.zeros((3, 2, 2)), "labels": np.zeros(3)}, "labels must be integers from 0; they are float64"),
        ({"images": np.zeros((3, 2, 2)), "labels": np.array([0, -1, 1])}, "they are int64, from -1"),
        ({"images": np.zeros((3, 2, 2), int), "labels": np.zeros(3, int)}, "images are int64; save them as uint8"),
        ({"images": np.array([None]), "labels": np.zeros(1, int)}, "not a .npz file with plain arrays"),
        (
            {"images": np.array([0, np.nan, 1e300]).reshape(3, 1, 1), "labels": np.zeros(3, int)},
            "2 of 3 images hold values that are not finite .* the first is image 1",
        ),
    ],
)
def test_a_file_that_holds_no_labelled_images_is_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        open_images(ImageConfig(str(tmp_path / "wrong.npz")))


def test_an_archive_that_unpacks_to_more_than_the_limit_is_not_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((100, 8, 8)), labels=np.zeros(100, int))
    monkeypatch.setattr(data_images, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ValueError, match=r"x\.npz: .*unpacks to 52,\d+ bytes.* 1,000"):
        open_images(ImageConfig(str(tmp_path / "x.npz")))


def test_what_is_no_file_of_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data 'stdlib': not images; pass 'digits', or a .npz file"):
        open_images(ImageConfig("stdlib"))
    with pytest.raises(ValueError, match=r"No such file or directory; name a .npz file"):
        open_images(ImageConfig(str(tmp_path / "nothing.npz")))
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"not a .npz file with plain arrays"):
        open_images(ImageConfig(str(tmp_path / "text.npz")))


def test_images_that_do_not_fit_the_model_are_refused(numbered):
    with pytest.raises(ValueError, match=r"images are \[2, 3, 1\] \(H W C\), and the model takes \[8, 8, 1\]"):
        open_images(ImageConfig(numbered), shape=(8, 8, 1))
    with pytest.raises(ValueError, match="labels go up to 11, and the model has 10 classes; give it at least 12"):
        open_images(ImageConfig(numbered), num_classes=10)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        open_images(ImageConfig("digits"))


# ---- the split ----


def test_the_split_is_a_partition_that_depends_on_its_own_seed_alone(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0.25, seed=0))
    assert sorted([*data.train, *data.eval]) == list(range(NUM_IMAGES)) and len(data.eval) == 3
    again = open_images(ImageConfig(numbered, eval_fraction=0.25, seed=5))
    np.testing.assert_array_equal(data.eval, again.eval)
    other = open_images(ImageConfig(numbered, eval_fraction=0.25, split_seed=1))
    assert data.eval.tolist() != other.eval.tolist()


def test_the_held_out_digits_are_the_same_on_every_machine():
    """A change of these would change every accuracy that was ever logged."""
    data = open_images(ImageConfig("digits", eval_fraction=0.2))
    assert data.eval[:8].tolist() == [3, 7, 9, 11, 18, 23, 24, 25]


def test_nothing_or_everything_held_out(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0))
    assert len(data.eval) == 0
    with pytest.raises(ValueError, match="no images are held out; set eval_fraction above 0"):
        make_image_eval_iterator(data, batch_size=1)
    with pytest.raises(ValueError, match=r"eval_fraction=0.99 of 12 images leaves none to train on"):
        open_images(ImageConfig(numbered, eval_fraction=0.99))


# ---- order, shares and state ----


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_each_epoch_gives_every_image_to_exactly_one_process_in_an_order_of_its_own(numbered, process_count):
    data = open_images(ImageConfig(numbered, eval_fraction=0))
    per_process = NUM_IMAGES // process_count
    shares = []
    for index in range(process_count):
        iterator = make_image_train_iterator(data, batch_size=1, process_index=index, process_count=process_count)
        shares.append(np.array(labels_of(take(iterator, 3 * per_process))).reshape(3, per_process))
    epochs = [np.concatenate([share[epoch] for share in shares]).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(NUM_IMAGES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_do_not_depend_on_the_number_of_processes(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0))

    def labels(process_count, states=(), num=7):
        options = {"batch_size": 6 // process_count, "process_count": process_count}
        iterators = [make_image_train_iterator(data, process_index=i, **options) for i in range(process_count)]
        for iterator in iterators:
            if states:
                iterator.set_state(*states)
        found = [np.reshape(labels_of(take(iterator, num)), (num, -1)) for iterator in iterators]
        return np.concatenate(found, axis=1).tolist(), [iterator.get_state() for iterator in iterators]

    expected, _ = labels(1, num=14)
    for process_count in (2, 3, 6):
        found, states = labels(process_count)
        assert [*found, *labels(2, states)[0]] == expected


def test_a_batch_holds_images_with_their_own_labels(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0.25))
    for batch in take(make_image_train_iterator(data, batch_size=5), 4):
        assert batch["images"].shape == (5, 2, 3, 1) and (batch["weights"] == 1).all()
        np.testing.assert_array_equal(batch["images"][:, 0, 0, 0], batch["labels"])
        assert set(batch["labels"]) <= set(data.train.tolist())


def test_other_seeds_give_other_orders(numbered):
    orders = []
    for seed in (0, 0, 1):
        data = open_images(ImageConfig(numbered, eval_fraction=0, seed=seed))
        orders.append(labels_of(take(make_image_train_iterator(data, batch_size=4), 3)))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(("batch_size", "process_count"), [(2, 1), (2, 2), (4, 2)])
def test_evaluation_passes_once_over_the_held_out_images_whatever_the_processes(numbered, batch_size, process_count):
    data = open_images(ImageConfig(numbered, eval_fraction=0.4))
    shares = [
        list(make_image_eval_iterator(data, batch_size=batch_size, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert len({len(share) for share in shares}) == 1, "processes that run a step together need equally many batches"
    rows = []
    for batches in zip(*shares, strict=True):
        for batch in batches:
            assert batch["images"].shape == (batch_size, 2, 3, 1)
            rows += [int(label) for label, weight in zip(batch["labels"], batch["weights"]) if weight]
            assert not batch["images"][batch["weights"] == 0].any()
    assert rows == data.eval.tolist()


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_saved_state_continues_bit_for_bit_across_an_epoch(numbered, prefetch_batches):
    data = open_images(ImageConfig(numbered, eval_fraction=0.25))
    iterator = make_image_train_iterator(data, batch_size=4, prefetch_batches=prefetch_batches)
    take(iterator, 5)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 6)
    other = make_image_train_iterator(data, batch_size=4)
    other.set_state(state)
    assert_batches_equal(take(other, 6), expected)


def test_a_state_of_another_stream_is_refused(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0.25))
    state = make_image_train_iterator(data, batch_size=4).get_state()
    with pytest.raises(ValueError, match="in other data: global_batch was 4, is 3"):
        make_image_train_iterator(data, batch_size=3).set_state(state)
    other = open_images(ImageConfig(numbered, eval_fraction=0.25, seed=1))
    with pytest.raises(ValueError, match="in other data: seed was 0, is 1"):
        make_image_train_iterator(other, batch_size=4).set_state(state)


def test_shares_that_make_no_sense_are_refused(numbered):
    data = open_images(ImageConfig(numbered, eval_fraction=0))
    with pytest.raises(ValueError, match="batch_size=0: must be at least 1"):
        make_image_train_iterator(data, batch_size=0)


def test_importing_the_data_room_loads_neither_grain_nor_scikit_learn():
    code = "import sys, jfsdp.trainer.data; print({'grain', 'sklearn', 'tokenizers', 'jax'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
