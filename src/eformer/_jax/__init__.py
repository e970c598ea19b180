"""All that eformer knows of JAX's private and undocumented parts: named views of single facts, no policy of ours.

No other module imports `jax._src` or reads undocumented attributes of JAX's objects, but for a short list that
`tests/test_house.py` holds. A release of JAX that moves something is met here.
"""

from __future__ import annotations

from .avals import ShapedArray as ShapedArray
from .avals import active_mesh as active_mesh
from .avals import agree as agree
from .avals import derived_aval as derived_aval
from .avals import explicit_sharding_of as explicit_sharding_of
from .avals import result_avals as result_avals
from .avals import result_type as result_type
from .avals import typed_by_a_mesh as typed_by_a_mesh
from .avals import vary as vary
from .avals import varying_axes as varying_axes
from .avals import varying_axes_of_type as varying_axes_of_type
from .avals import with_sharding_type as with_sharding_type
from .avals import zeros_like_in as zeros_like_in
from .callers import read_by_array_constructor as read_by_array_constructor
from .callers import read_by_array_operator as read_by_array_operator
from .functions import bind_functions as bind_functions
from .functions import bind_shard_map as bind_shard_map
from .functions import called as called
from .functions import called_backward as called_backward
from .functions import instantiated as instantiated
from .functions import is_function as is_function
from .functions import is_symbolic_zero as is_symbolic_zero
from .functions import map_results as map_results
from .functions import split_forward as split_forward
from .functions import symbolic_zero as symbolic_zero
from .functions import wrap_function as wrap_function
from .jaxprs import inlined_early as inlined_early
from .jaxprs import is_jnp_hi_primitive as is_jnp_hi_primitive
from .jaxprs import jaxpr_function as jaxpr_function
from .jaxprs import lower_hi_primitive as lower_hi_primitive
from .jaxprs import params_use as params_use
from .jaxprs import remat_hi_primitive as remat_hi_primitive
from .jaxprs import scan_counts as scan_counts
from .locations import calling_location as calling_location
from .locations import replayed_location as replayed_location
from .locations import replaying as replaying
from .primitives import Primitive as Primitive
from .primitives import ad as ad
from .primitives import batching as batching
from .primitives import define_lowering as define_lowering
from .primitives import define_platform_lowering as define_platform_lowering
from .primitives import lax_primitive as lax_primitive
from .primitives import mlir as mlir
from .primitives import primitive_names as primitive_names
from .processes import distributed_client as distributed_client
from .traces import LayeredTrace as LayeredTrace
from .traces import LayeredTracer as LayeredTracer
from .traces import Trace as Trace
from .traces import Tracer as Tracer
from .traces import TraceTag as TraceTag
from .traces import axis_mapped as axis_mapped
from .traces import bind_at as bind_at
from .traces import bind_params as bind_params
from .traces import current_trace as current_trace
from .traces import eval_trace as eval_trace
from .traces import install_trace as install_trace
from .traces import is_current as is_current
from .traces import is_staging as is_staging
from .traces import register_tracer_type as register_tracer_type
from .traces import register_value_type as register_value_type
from .traces import set_current_trace as set_current_trace
