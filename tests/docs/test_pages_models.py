"""The Python examples of pages about models run."""

import pytest

from tests.docs import pages


@pytest.mark.parametrize("page", pages.cases(pages.MODELS))
def test_examples_run_in_their_order(page, workdir):
    pages.run(page)
