"""A run behind HTTP: predictions and learning for programs, figures for monitors, the report for people."""

try:
    import prometheus_client as _prometheus_client  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError("serving needs starlette, uvicorn and prometheus-client: `pip install 'opvi[serve]'`.") from error

from opvi.app.serve._options import Options as Options
from opvi.app.serve._server import Address as Address
from opvi.app.serve._server import serve as serve
