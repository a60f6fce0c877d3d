"""Every private name and attribute of torch that Lowtide leans on, with the versions it was seen in.

In: nothing.
Out: what other rooms ask of torch's insides; `names.py` has the table.
Imports: nothing but `process_wide`.
"""

from __future__ import annotations

from .autograd import (
    autocast_knows,
    boxed,
    count_global_hooks,
    edges_of,
    frees_tangents,
    in_backward,
    place_of,
    when_backward_ends,
)
from .compiling import compiled, stance, usual_stance
from .drafts import Strides, drafted, report_strides
from .front_end import branches_answered, calls_looked_at
from .generators import drawn_from, generators_traced, with_generator
from .gradients_inside import leaves_may_be_inside
from .inductor import generated_code, generated_modules, realized_where_asked, scheduler_pass
from .joint_traces import JointTrace
from .kernels import eager_kernels
from .module_hooks import module_hooks_traced
from .names import ATTRIBUTES, NAMES, missing_names, private, private_of, set_private
from .optimizers import (
    changes_gradients,
    is_optimizer_hook,
    steps_as_its_class,
    unhooked,
    without_optimizer_hooks,
)
from .settings import (
    RECAPTURES,
    capture_settings,
    code_on_demand,
    first_run_unwatched,
    in_process_group,
    keeping_draws,
    module_of,
    settings_kept,
    telling_of_a_capture,
)
from .sizes import (
    SYMBOLIC,
    called,
    expression,
    has_marks,
    hint,
    marked_sizes,
    sizes_marked,
    specialised_at,
    with_numbers,
)
from .tensors import holders, inner_tensors, is_made_of_others, is_view, storage_key
from .trace_rules import rules_as_plain
from .traces import (
    met_in_capture,
    outside_dynamo,
    present_trace,
    traced_input,
    traced_value,
    untraced,
    writes_traced,
)
from .unread import (
    calls_unnamed,
    guards_untimed,
    metrics_without_settings,
    without_graph_texts,
)

__all__ = [
    "ATTRIBUTES",
    "NAMES",
    "RECAPTURES",
    "SYMBOLIC",
    "JointTrace",
    "Strides",
    "autocast_knows",
    "boxed",
    "branches_answered",
    "called",
    "calls_looked_at",
    "calls_unnamed",
    "capture_settings",
    "changes_gradients",
    "code_on_demand",
    "compiled",
    "count_global_hooks",
    "drafted",
    "drawn_from",
    "eager_kernels",
    "edges_of",
    "expression",
    "first_run_unwatched",
    "frees_tangents",
    "generated_code",
    "generated_modules",
    "generators_traced",
    "guards_untimed",
    "has_marks",
    "hint",
    "holders",
    "in_backward",
    "in_process_group",
    "inner_tensors",
    "is_made_of_others",
    "is_optimizer_hook",
    "is_view",
    "keeping_draws",
    "leaves_may_be_inside",
    "marked_sizes",
    "met_in_capture",
    "metrics_without_settings",
    "missing_names",
    "module_hooks_traced",
    "module_of",
    "outside_dynamo",
    "place_of",
    "present_trace",
    "private",
    "private_of",
    "realized_where_asked",
    "report_strides",
    "rules_as_plain",
    "scheduler_pass",
    "set_private",
    "settings_kept",
    "sizes_marked",
    "specialised_at",
    "stance",
    "steps_as_its_class",
    "storage_key",
    "telling_of_a_capture",
    "traced_input",
    "traced_value",
    "unhooked",
    "untraced",
    "usual_stance",
    "when_backward_ends",
    "with_generator",
    "with_numbers",
    "without_graph_texts",
    "without_optimizer_hooks",
    "writes_traced",
]
