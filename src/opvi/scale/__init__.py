"""Many devices, many models."""

from opvi.scale._sharding import mesh as mesh
from opvi.scale._sharding import place as place
from opvi.scale._sharding import sharded as sharded
from opvi.scale.fleet import Fleet as Fleet
from opvi.scale.fleet import Keyed as Keyed
from opvi.scale.fleet import pooled as pooled
