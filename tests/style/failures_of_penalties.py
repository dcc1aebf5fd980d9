"""How penalties, hooks and monitors fail elsewhere, and the tests that hold this library's to it.

Rows E are regularizers, rows F hooks, monitors and progress; the properties are those of the formulas. Every row
names its tests; that they exist is tested in `test_known_failures.py`.
"""

from __future__ import annotations

BASE = "regularizers/test_base.py"
ORTHOGONAL = "regularizers/test_orthogonality.py"
SHIFT = "regularizers/test_scale_shift.py"
SOM = "regularizers/test_self_orthogonality.py"
PENALTY = "penalty/test_penalty.py"
COMPILED = "penalty/test_compiled.py"
BINDING = "penalty/test_binding.py"
GROUPS = "penalty/test_param_groups.py"
TAP = "penalty/test_tap.py"
RANKS = "penalty/test_processes.py"
FINITE = "laws/test_finite.py"
SITE = "surgery/test_site.py"
SIGNALS = "measuring/test_signals.py"
STRUCTURE = "measuring/test_structure.py"
PROGRESS = "compare/test_progress.py"

# failure → (what happens elsewhere, the tests that it does not happen here)
FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "E1": (
        "log‖W‖ has no floor: its gradient explodes and a step carries the weight past zero",
        (
            f"{SHIFT}::test_descent_never_overshoots_the_floor",
            f"{SHIFT}::test_descent_overshoots_without_a_floor",
            f"{SHIFT}::test_a_normalised_network_does_not_catapult",
            f"{SHIFT}::test_a_normalised_network_catapults_without_a_floor",
            f"{SHIFT}::test_small_weights_are_let_go",
            f"{BINDING}::test_check_refuses_steps_past_zero",
            f"{COMPILED}::test_floors_zeros_and_stacked_blocks",
        ),
    ),
    "E2": ("the printed second term is the constant 1", (f"{SHIFT}::test_the_printed_second_term_is_a_constant",)),
    "E3": (
        "moving scale is taken to keep the function where activations or normalisation say otherwise",
        (
            f"{BINDING}::test_activations_that_are_not_homogeneous_are_said",
            f"{BINDING}::test_scale_before_normalisation_is_left_out_and_said",
            "surgery/test_balance.py::test_every_connection_keeps_the_function",
            "surgery/test_balance.py::test_what_is_not_homogeneous_is_refused_with_the_reason",
        ),
    ),
    "E4": (
        "weight decay also on biases, scales and magnitudes, or twice on one scale",
        (
            f"{GROUPS}::test_weights_decay_and_nothing_else",
            f"{GROUPS}::test_networks_that_people_train",
            f"{GROUPS}::test_scale_that_a_penalty_holds_does_not_decay_as_well",
            f"{BINDING}::test_check_finds_what_the_optimizer_does_twice_or_not_at_all",
        ),
    ),
    "E5": (
        "sampling noise of small batches reads as correlation",
        (
            f"{SOM}::test_the_floor_of_orthogonal_filters_is_the_formula",
            f"{SOM}::test_debiased_value",
            f"{BINDING}::test_table",
        ),
    ),
    "E6": (
        "correlations of opposite sign cancel in the squared sum",
        (
            f"{SOM}::test_cancelling_correlations_hide_from_the_mean_term_alone",
            f"{PENALTY}::test_values_name_the_terms_of_a_term",
        ),
    ),
    "E7": (
        "derivatives of singular vectors are NaN at repeated values, that is at orthogonal weights",
        (
            f"{BASE}::test_repeated_singular_values_cost_nothing",
            f"{BASE}::test_derivatives_of_singular_vectors_do_not_exist_there",
            f"{BASE}::test_a_weight_that_diverged_shows",
            f"{ORTHOGONAL}::test_srip_survives_an_orthogonal_weight",
        ),
    ),
    "E8": (
        "a penalty counts once per micro-batch, per process, or per owner of a tied weight",
        (
            f"{PENALTY}::test_accumulated_micro_batches_equal_one_batch",
            f"{BINDING}::test_tied_tensors_count_once",
            f"{RANKS}::test_data_parallel_equals_the_joined_batch",
        ),
    ),
    "E9": (
        "the norm of a shard is taken for that of the weight",
        (f"{RANKS}::test_sharded_equals_whole", f"{RANKS}::test_added_gradients_of_sharded_weights"),
    ),
    "E10": (
        "sums of squares overflow half precision",
        (f"{BASE}::test_large_weights_do_not_overflow", f"{FINITE}::test_regularizer_does_not_overflow"),
    ),
    "F1": (
        "a hook that is added after the first compiled call never fires",
        (
            f"{TAP}::test_compiled_before_the_penalty_was_built_is_an_error",
            f"{TAP}::test_compiled_after_the_penalty_was_built",
            f"{STRUCTURE}::test_a_compiled_model_is_measured_as_the_plain_one",
        ),
    ),
    "F2": (
        "hooks fire again in the recomputation of a checkpoint",
        (
            f"{TAP}::test_checkpointing_changes_no_bit_and_counts_once",
            f"{TAP}::test_reentrant_checkpointing_is_refused",
            f"{SIGNALS}::test_a_checkpointed_model_gives_the_same",
        ),
    ),
    "F3": (
        "activations are kept, handles stay after an exception",
        (
            f"{TAP}::test_a_thousand_steps_keep_nothing",
            f"{TAP}::test_activations_are_let_go",
            f"{TAP}::test_no_hook_is_left",
            f"{TAP}::test_forgetting_to_call_is_an_error_not_a_leak",
            f"{SIGNALS}::test_nothing_is_left_behind",
        ),
    ),
    "F4": (
        "names carry what wrappers put in front",
        (
            f"{BINDING}::test_paths_are_those_of_the_users_model",
            f"{BINDING}::test_normalisation_is_found_inside_wrappers",
            f"{TAP}::test_a_compiled_model_is_read_by_its_own_paths",
            f"{SITE}::test_paths_leave_out_what_wrappers_add",
        ),
    ),
    "F5": (
        "outputs that are no tensor, or that are overwritten in place",
        (
            f"{TAP}::test_outputs_are_read_as_the_layer_put_them_out",
            f"{TAP}::test_outputs_overwritten_later_are_an_error_once",
            f"{STRUCTURE}::test_any_call_and_any_output",
            f"{SIGNALS}::test_working_in_place_changes_no_figure",
        ),
    ),
    "F6": (
        "lazy or shared modules and deep nesting break the walk",
        (
            f"{BINDING}::test_deep_shared_and_lazy_modules_are_bound",
            f"{SITE}::test_depth_is_no_problem",
            f"{SITE}::test_a_module_that_contains_itself_ends",
        ),
    ),
    "F7": (
        "progress bars flood logs",
        (
            f"{PROGRESS}::test_bar_only_on_a_terminal",
            f"{PROGRESS}::test_lines_come_at_most_every_ten_seconds_and_every_tenth",
        ),
    ),
}

PROPERTIES: dict[str, tuple[str, ...]] = {
    "Gaussian probes read 1 − 2θ/π": (f"{SOM}::test_gaussian_probes_read_the_angle",),
    "rectified inputs need centring": (
        f"{SOM}::test_rectified_inputs_need_centring",
        f"{SOM}::test_right_angles_after_a_relu_read_as_one_half_without_centring",
    ),
    "mean reduction does not depend on filters or samples": (
        f"{SOM}::test_mean_reduction_does_not_depend_on_the_size_of_the_problem",
    ),
    "a zero column, one filter and one sample give a finite value and no gradient": (
        f"{SOM}::test_an_output_that_does_not_vary_is_left_out",
        f"{SOM}::test_degenerate_shapes",
    ),
    "self-orthogonality passes gradcheck": (f"{SOM}::test_first_and_second_derivatives",),
    "it drives free filters to 90° with less spread": (
        f"{SOM}::test_it_drives_angles_to_ninety_degrees",
        f"{SOM}::test_l2_does_not_turn_filters",
    ),
    "orthogonality penalties are 0 at (semi-)orthogonal weights alone": (
        f"{ORTHOGONAL}::test_zero_exactly_at_semi_orthogonal_weights",
    ),
    "their gradients are the closed forms, and added in place the same": (
        f"{ORTHOGONAL}::test_gradients_are_the_closed_forms",
        f"{BASE}::test_gradients_added_in_place_are_those_of_autograd",
        f"{PENALTY}::test_add_grads_equals_backward",
        f"{COMPILED}::test_added_gradients_are_the_derivative",
    ),
    "the power iteration's estimate rises to the spectral norm": (
        f"{ORTHOGONAL}::test_srip_rises_to_the_spectral_norm",
    ),
    "no value is below its bound, the Welch bound is reached": (
        f"{BASE}::test_value_is_finite_and_above_its_bound",
        f"{ORTHOGONAL}::test_unit_filters_reach_the_welch_bound",
    ),
    "both sides of a square matrix give the same": (f"{ORTHOGONAL}::test_both_sides_differ_by_the_surplus",),
    "the logarithm is invariant when the factors' product is 1": (
        f"{SHIFT}::test_scale_moved_between_layers_changes_nothing",
    ),
    "it is not under rescaling of single neurons": (f"{SHIFT}::test_rescaling_single_neurons_is_seen",),
    "the first term's gradient is W/‖W‖², the second's is orthogonal to W": (
        f"{SHIFT}::test_the_gradient_of_the_first_term",
        f"{SHIFT}::test_the_gradient_of_the_second_term_is_orthogonal_to_the_weight",
    ),
    "a zero weight is finite, and left out": (
        f"{SHIFT}::test_small_weights_are_let_go",
        f"{BINDING}::test_weights_that_start_at_zero_are_left_out_of_the_logarithm",
    ),
    "weights before a normalisation layer are skipped": (
        f"{BINDING}::test_scale_before_normalisation_is_left_out_and_said",
    ),
    "tied weights count once": (f"{BINDING}::test_tied_tensors_count_once",),
    "L2 is lowered by moving scale": (f"{SHIFT}::test_l2_is_lowered_by_moving_scale",),
}
