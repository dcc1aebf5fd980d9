"""How normalisation fails elsewhere, what it must do, and the tests that hold it to both.

The failures are those of weight parametrizations (A) and normalisation layers (C) in torch and in published
code, most of them with a thread in an issue tracker; the properties are those of its formulas. Every row names
its tests; that they exist is tested in `test_known_failures.py`.
"""

from __future__ import annotations

LIFE = "parametrizations/test_lifecycle.py"
COPY = "parametrizations/test_copying.py"
START = "parametrizations/test_assignment.py"
STATE = "parametrizations/test_state_dicts.py"
BUILD = "parametrizations/test_compiling.py"
SPECTRAL = "parametrizations/test_spectral_norm.py"
POLAR = "parametrizations/test_orthogonal.py"
ATTACH = "parametrizations/test_attach.py"
EXTREME = "parametrizations/test_degenerate.py"
SWITCH = "nn/test_switchable_norm.py"
MANY = "nn/test_norm_processes.py"
CALIBRATE = "surgery/test_calibrate.py"
ADVICE = "measuring/test_advice.py"
NETWORKS = "laws/test_networks.py"

# failure → (what happens elsewhere, the tests that it does not happen here)
FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "A1": (
        "power iteration advances again in the recomputation of a checkpointed forward: wrong gradients, no error",
        (f"{LIFE}::test_checkpointing_changes_no_bit", f"{LIFE}::test_torchs_spectral_norm_fails_the_same_test"),
    ),
    "A2": (
        "folding a copy destroys the original, which shares its class",
        (
            f"{COPY}::test_detaching_a_copy_leaves_the_original",
            f"{ATTACH}::test_class_is_shared_by_copies_and_never_changed",
        ),
    ),
    "A3": (
        "models with the old weight norm cannot be copied once they have run",
        (
            f"{COPY}::test_copies_after_forward_and_backward",
            f"{STATE}::test_torchs_checkpoints_mean_their_effective_weight",
        ),
    ),
    "A4": (
        "parametrized models do not pickle, save whole, or go to another process",
        (f"{COPY}::test_detaching_a_copy_leaves_the_original", f"{COPY}::test_spawn_sends_models"),
    ),
    "A5": (
        "weight norm of a zero filter is NaN, forwards and backwards",
        (f"{EXTREME}::test_value_and_derivatives_are_finite", f"{LIFE}::test_zero_weights_are_finite_and_stay_so"),
    ),
    "A6": (
        "spectral norm of a zero weight is NaN; a vector normalised by a tiny ε has a gradient of 1e12",
        (
            f"{EXTREME}::test_value_and_derivatives_are_finite",
            f"{SPECTRAL}::test_vectors_of_another_weight_do_not_explode",
        ),
    ),
    "A7": (
        "reading the weight for logging or averaging moves its state",
        (f"{SPECTRAL}::test_only_ticks_move_the_vectors", "laws/test_checkpoint.py::test_reading_changes_nothing"),
    ),
    "A8": (
        "two forwards before a backward, retained graphs and second derivatives meet state that has moved",
        (
            f"{LIFE}::test_several_forwards_and_backwards",
            f"{SPECTRAL}::test_a_tick_between_forward_and_backward_is_harmless",
            "laws/test_gradcheck.py::test_parametrization_second_derivative",
        ),
    ),
    "A9": (
        "folding in training mode keeps another weight than evaluation used",
        (f"{LIFE}::test_folding_is_the_same_in_both_modes",),
    ),
    "A10": (
        "after meta initialisation the singular vectors are garbage, silently",
        (f"{START}::test_meta_then_reset_equals_direct", f"{START}::test_an_unset_model_raises"),
    ),
    "A11": (
        "orthogonal weights in half precision raise, or are not orthogonal",
        (f"{POLAR}::test_layers_of_every_dtype", f"{LIFE}::test_half_precision_is_float32_rounded"),
    ),
    "A12": (
        "norms are taken in half precision under autocast",
        (
            f"{LIFE}::test_autocast_computes_the_weight_in_float32",
            "laws/test_compile.py::test_autocast_keeps_the_precision_of_a_weight",
        ),
    ),
    "A13": (
        "an ε of float32 vanishes in float16, and 0/0 is NaN",
        (
            f"{EXTREME}::test_the_scale_of_what_is_trained_is_forgotten",
            "geometry/test_norms.py::test_finite_value_and_two_finite_derivatives",
        ),
    ),
    "A14": (
        "graph breaks and recompilations, one per layer",
        (f"{BUILD}::test_training_with_ticks_is_one_graph_compiled_once", "laws/test_compile.py::test_compile"),
    ),
    "A15": (
        "compiled data-parallel training of parametrized layers raises",
        (
            "parametrizations/test_processes.py::test_ticks_in_two_processes_equal_those_of_one",
            f"{MANY}::test_training",
        ),
    ),
    "A16": (
        "parametrized layers cannot be scripted or exported",
        (
            f"{BUILD}::test_trace_works_and_script_fails_loudly",
            f"{BUILD}::test_export_in_both_modes",
            f"{NETWORKS}::test_a_folded_network_runs_in_onnx",
        ),
    ),
    "A17": (
        "plain and old checkpoints do not load, and loading is not what was saved",
        (
            f"{STATE}::test_a_plain_checkpoint_becomes_the_effective_weight",
            f"{STATE}::test_torchs_checkpoints_mean_their_effective_weight",
            f"{STATE}::test_own_checkpoints_load_into_one_another",
            f"{STATE}::test_a_folded_checkpoint_computes_the_same",
        ),
    ),
    "A18": (
        "tied weights are untied, or stay one tensor with two functions",
        (
            f"{ATTACH}::test_one_parametrization_for_tied_layers",
            "surgery/test_verbs.py::test_tied_layers_stay_tied",
            "surgery/test_verbs.py::test_a_tie_to_an_unselected_layer_is_refused",
        ),
    ),
    "A19": (
        "an optimizer that was built before trains a tensor that is no longer used, without an error",
        (
            f"{ATTACH}::test_an_optimizer_built_before_trains_the_layer",
            "surgery/test_verbs.py::test_added_parameters_reach_the_optimizer",
            "surgery/test_awaiting.py::test_it_raises_and_trains_nothing",
            "surgery/test_verbs.py::test_an_optimizer_of_another_model_is_refused_and_nothing_changes",
        ),
    ),
    "A20": ("a cache of computed weights is stale after a step", (f"{LIFE}::test_no_read_is_stale",)),
    "A21": (
        "frozen weights thaw",
        (
            f"{ATTACH}::test_added_parameters_are_frozen_with_the_weight",
            "laws/test_layout.py::test_attach_keeps_frozen",
        ),
    ),
    "A22": (
        "filters of transposed and grouped convolutions are taken along the wrong axis",
        (
            "surgery/test_fold_kinds.py::test_layer_and_norm_become_one_plain_layer",
            "parametrizations/test_row_members.py::test_weight_norm_has_one_gain_per_output_filter",
            f"{SPECTRAL}::test_filters_have_the_norm",
        ),
    ),
    "C1": (
        "a last batch of one sample stops training with an error, an epoch later",
        (
            f"{ADVICE}::test_training_stops_at_a_last_batch_of_one_as_foretold",
            f"{SWITCH}::test_a_single_value_is_refused",
        ),
    ),
    "C2": (
        "one batch with NaN stays in running statistics for ever",
        (f"{CALIBRATE}::test_one_batch_with_nan_is_found_and_repaired",),
    ),
    "C3": (
        "half precision overflows in the statistics",
        (f"{SWITCH}::test_half_precision_does_not_overflow", f"{SWITCH}::test_halves_are_normalised_in_float32"),
    ),
    "C4": (
        "checkpointed layers count each batch twice",
        (
            f"{SWITCH}::test_checkpointing_counts_a_batch_once",
            f"{SWITCH}::test_checkpointing_changes_no_bit",
            f"{ADVICE}::test_checkpointing_moves_batch_statistics_twice",
        ),
    ),
    "C5": (
        "two forwards of a data-parallel model before a backward raise",
        (f"{MANY}::test_training", f"{SWITCH}::test_several_forwards_before_one_backward"),
    ),
    "C6": (
        "synchronised statistics need a GPU, equal batches, and are wrong for channels_last",
        (f"{MANY}::test_batches_of_unequal_size_and_an_empty_one", "nn/test_ranks.py::test_two_processes_equal_one"),
    ),
    "C7": ("synchronised norms under compilation and data parallelism raise", (f"{MANY}::test_training",)),
    "C8": (
        "gradients are wrong, or the layout is lost, for channels_last under a compiler",
        (f"{SWITCH}::test_compiled_in_every_layout", f"{SWITCH}::test_channels_last"),
    ),
    "C9": (
        "a group or layer norm over single values erases its input",
        (
            f"{ADVICE}::test_a_norm_over_single_values_gives_its_shift",
            f"{ADVICE}::test_a_rule_finds_its_cases_and_not_those_beside_them",
        ),
    ),
    "C10": (
        "published switchable norms: NaN at one pixel, no digits at a large mean, sums instead of averages",
        (
            f"{SWITCH}::test_values_and_gradients",
            f"{SWITCH}::test_a_mean_far_above_the_spread_costs_no_digits",
            f"{SWITCH}::test_a_fresh_norm_evaluates_with_unit_variance",
            f"{SWITCH}::test_running_statistics_follow_torchs_convention",
            f"{CALIBRATE}::test_equal_batches_average_as_the_published_code_meant_to",
        ),
    ),
    "C11": (
        "evaluation is far worse than training",
        (
            f"{CALIBRATE}::test_batch_average_of_a_switchable_norm",
            f"{CALIBRATE}::test_one_batch_then_eval_equals_training_mode_up_to_the_unbiased_factor",
            "surgery/test_calibrate_processes.py::test_two_processes_equal_one",
        ),
    ),
}

CONV = "geometry/test_conv_norm.py"
COMPILE = "laws/test_compile.py"
COPIES = "laws/test_copies.py"

# property → its tests
PROPERTIES: dict[str, tuple[str, ...]] = {
    "a switchable norm with one weight at 1 is an instance, layer or batch norm": (
        f"{SWITCH}::test_one_weight_at_one_is_a_torch_norm",
    ),
    "it is finite on 1×1 maps and for a batch of one": (f"{SWITCH}::test_values_and_gradients",),
    "its statistics equal float64 at a mean far above the spread, also of half-precision inputs": (
        f"{SWITCH}::test_a_mean_far_above_the_spread_costs_no_digits",
        f"{SWITCH}::test_halves_are_normalised_in_float32",
    ),
    "its calibration is the hand-written mean over batches, and on one batch evaluation equals training": (
        f"{CALIBRATE}::test_batch_average_of_a_switchable_norm",
    ),
    "its gradients, those of the mixture included, pass gradcheck and gradgradcheck": (f"{SWITCH}::test_derivatives",),
    "it keeps channels_last": (f"{SWITCH}::test_channels_last", f"{SWITCH}::test_compiled_in_every_layout"),
    "in two processes it equals one with the joined batch": (
        "nn/test_ranks.py::test_two_processes_equal_one",
        "laws/test_distributed.py::test_data_parallel",
    ),
    "a group norm with one group is a layer norm, with one channel per group an instance norm": (
        "nn/test_norm_conversion.py::test_a_group_norm_is_a_layer_norm_or_an_instance_norm_at_the_ends",
    ),
    "the norm of a convolution is that of the dense operator": (
        f"{CONV}::test_exact_norm_is_that_of_the_dense_periodic_operator",
        f"{CONV}::test_zero_padding_is_below_every_certificate",
        f"{SPECTRAL}::test_convolutions_are_bounded_on_every_grid",
    ),
    "it is at most √(kernel size) times that of the reshaped weight": (
        f"{CONV}::test_bounds_are_above_in_the_right_order",
    ),
    "of groups it is the maximum": (f"{CONV}::test_groups_take_the_maximum",),
    "the Gram bound is above it and falls": (f"{CONV}::test_gram_bound_falls_with_every_iteration_and_stays_above",),
    "rules select the intended tensors, and say what they skip and why": (
        "surgery/test_where.py::test_where_selects",
        "surgery/test_where.py::test_what_matches_but_cannot_be_acted_on_is_named_with_the_reason",
    ),
    "folding deviates by at most 1e-5 in float32 and 1e-12 in float64": (
        "surgery/test_fold_kinds.py::test_layer_and_norm_become_one_plain_layer",
        f"{NETWORKS}::test_a_trained_network_folds_to_plain_layers",
    ),
    "layers survive state dicts, deepcopy and pickle": (
        f"{COPIES}::test_state_dict_round_trip",
        f"{COPIES}::test_copy_is_the_same",
        f"{COPIES}::test_copy_is_independent",
    ),
    "layers are exported and compiled whole": (f"{COMPILE}::test_export", f"{COMPILE}::test_compile"),
    "autocast changes no statistic": (f"{COMPILE}::test_autocast",),
    "a second application is refused or changes nothing; an undo restores classes and names": (
        "laws/test_verbs.py::test_second_application",
        "laws/test_verbs.py::test_undo_restores_everything",
    ),
}
