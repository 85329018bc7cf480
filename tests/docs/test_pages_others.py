"""The Python examples of pages of all other subjects run."""

import pytest

from tests.docs import pages


@pytest.mark.parametrize("page", pages.cases(pages.OTHERS))
def test_examples_run_in_their_order(page, workdir):
    pages.run(page)
