import pytest

from tests.api.fakes import Site, make_site


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def site() -> Site:
    return make_site()
