"""Flags by which JAX takes new implementations of its own, and what fails under them by no
fault of this library.

Each fault has a reproduction in plain JAX, in `jax_faults.py`. `test_jax_flags.py` runs
it: it must fail under the flag, so that a fault which JAX has repaired is noticed, and must
pass without it. `conftest.py` marks the tests that a fault makes fail; they must fail, too.
What no reproduction explains is a fault of ours. The flags are those of jax 0.12.

`.ci/run` sets all of them at once, for the tests that `PATHS` names: what the flags change
are loops, custom rules and checkpoints, and the derivatives and batches of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax_faults

PATHS = (
    "test_jax_flags.py",
    "compat/test_jaxpr.py",
    "jit/test_checks.py",
    "jit/test_jit.py",
    "loops",
    "runtime",
    "transforms",
    "nn/test_attention.py",
    "nn/test_kv_cache.py",
    "nn/test_conventions.py",
    "nn/test_costs.py",
    "nn/test_loss_scale.py",
    "nn/test_mlp.py",
    "nn/test_peer_models.py",
    "nn/test_reversible.py",
    "nn/test_cells.py",
    "nn/test_shape.py",
    "nn/test_stacked.py",
)


@dataclass(frozen=True)
class Fault:
    """Something that JAX gets wrong, and the tests that fail by it.

    A test is written without its parameters if all of them fail. `sure` tells whether it
    fails each time.
    """

    reproduce: Callable[[], None]
    tests: Sequence[str]
    sure: bool = True


FAULTS: dict[str, list[Fault]] = {
    "jax_scan3": [
        Fault(
            jax_faults.loop_has_a_reverse_mode,
            [
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive_by_a_gradient[scan]",
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive_by_a_gradient[scan-checkpoint]",
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive_by_a_gradient[bounded]",
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive_by_a_gradient[fori]",
                "runtime/test_error_if.py"
                "::test_check_is_the_identity_to_derivatives[filter_scan]",
                "runtime/test_error_if.py"
                "::test_check_is_the_identity_to_derivatives[scan]",
                "runtime/test_error_if.py"
                "::test_gradient_alone_keeps_the_check[filter_scan]",
                "runtime/test_error_if.py::test_gradient_alone_keeps_the_check[scan]",
                "loops/test_loop.py::test_reverse_mode_goes_through_a_known_number_of_steps",
                "loops/test_scan.py::test_agrees_with_jax_on_arrays",
                "loops/test_scan.py::test_checkpoint_keeps_nothing_of_a_step_but_its_carry",
                "loops/test_scan.py"
                "::test_checkpoint_keeps_as_little_if_the_loop_is_unrolled",
                "loops/test_scan.py::test_gradient_of_a_scan_is_that_of_the_loop",
                "nn/test_conventions.py::test_gradient_has_an_entry_for_each_parameter"
                "[scan MLP]",
                "nn/test_conventions.py::test_gradients_are_those_of_finite_differences"
                "[scan MLP]",
                "nn/test_mlp.py::test_activation_with_arrays_is_copied_for_each_neuron"
                "[True]",
                "nn/test_mlp.py::test_result_is_that_of_the_formula[3-True]",
                "nn/test_reversible.py"
                "::test_forward_mode_and_second_derivatives_need_plain_autodiff",
                "nn/test_reversible.py::test_that_of_plain_autodiff_does[stacked]",
                "nn/test_reversible.py"
                "::test_value_and_gradients_are_those_of_plain_autodiff"
                "[stacked-3-0.5-False]",
                "nn/test_stacked.py::test_checkpoint_keeps_less_for_the_backward_pass",
                "nn/test_stacked.py::test_values_and_gradients_are_those_of_the_loop",
                "transforms/test_custom_rules.py"
                "::test_output_that_depends_on_nothing_mapped_in_a_loop",
                "transforms/test_invertible.py::test_check_lets_a_true_inverse_pass",
                "loops/test_buffers.py"
                "::test_gradient_goes_through_what_is_read"
                "[2-{'kind': 'bounded', 'base': 2}]",
                "loops/test_buffers.py"
                "::test_gradient_goes_through_what_is_read"
                "[6-{'kind': 'bounded', 'base': 2}]",
                "loops/test_buffers.py"
                "::test_batches_write_where_they_still_go_on[bounded]",
                "loops/test_buffers.py"
                "::test_inner_loop_takes_buffers_of_the_outer[bounded-one]",
                "loops/test_buffers.py::test_slice_from_an_array_is_an_index[bounded]",
                "loops/test_internal_scan.py::test_batches_and_keys",
                "loops/test_internal_scan.py::test_gradient_within_shard_map",
                "loops/test_internal_scan.py"
                "::test_inputs_and_outputs_may_be_split_over_explicit_axes[2]",
                "loops/test_internal_scan.py"
                "::test_inputs_and_outputs_may_be_split_over_explicit_axes[all]",
                "loops/test_internal_scan.py::TestScanTrick::test_gradient",
                "loops/test_checkpointed.py"
                "::test_what_no_derivative_reaches_comes_out_without_one[scan]",
                "loops/test_while_loop.py"
                "::test_elements_of_a_batch_stop_when_they_are_done[0-bounded]",
                "loops/test_while_loop.py"
                "::test_elements_of_a_batch_stop_when_they_are_done[3-bounded]",
                "loops/test_while_loop.py"
                "::test_gradient_is_that_of_the_unrolled_program[bounded]",
                "loops/test_while_loop.py::test_loops_within_loops[bounded]",
                "loops/test_while_loop.py"
                "::test_public_loop_has_the_same_gradient[bounded]",
                "loops/test_while_loop.py"
                "::TestHigherDerivatives::test_batch_of_cotangents[bounded]",
                "loops/test_while_loop.py"
                "::TestHigherDerivatives::test_forward_over_reverse[bounded]",
                "loops/test_while_loop.py"
                "::TestHigherDerivatives::test_reverse_over_reverse",
                "runtime/test_guards.py"
                "::test_nondifferentiable_in_a_loop_meets_the_tangent_of_a_later_step",
                "runtime/test_noinline.py"
                "::test_every_transformation_gives_what_the_function_gives[scan-eager]",
                "runtime/test_noinline.py"
                "::test_every_transformation_gives_what_the_function_gives[scan-jit]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order[grad]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order"
                "[jit of vmap of grad]",
                "runtime/test_progress.py"
                "::test_bar_is_drawn_at_some_steps_and_ends_full[jit of vmap of grad]",
                "runtime/test_progress.py::test_loop_is_run_again_in_a_backward_pass",
                "loops/test_while_loop.py"
                "::test_key_in_the_carry_is_not_reported_as_used_twice[bounded]",
                "loops/test_buffers.py"
                "::test_what_a_custom_rule_drops_has_no_gradient[bounded]",
                "runtime/test_capture.py"
                "::test_model_that_takes_a_gradient_gives_each_value_once[True]",
                "loops/test_buffers.py"
                "::test_buffer_is_a_pytree_of_jax_arrays_wherever_users_see_it"
                "[grad-bounded]",
                "loops/test_cost.py"
                "::test_there_may_be_more_checkpoints_than_an_int32_counts_steps_for",
                "loops/test_cost.py"
                "::test_a_loop_in_a_loop_is_in_the_program_once_for_each_time_that_it_runs",
                "runtime/test_shared_checks.py"
                "::test_one_function_serves_all_checks_of_arrays_of_the_same_types"
                "[gradient of a scan-raise]",
                "runtime/test_shared_checks.py"
                "::test_one_function_serves_all_checks_of_arrays_of_the_same_types"
                "[gradient of a scan-nan]",
                "runtime/test_shared_checks.py"
                "::test_the_message_is_that_of_the_check_that_fails[gradient of a scan]",
            ],
        ),
        Fault(
            jax_faults.error_in_a_loop_names_the_function,
            [
                "transforms/test_tracer_errors.py"
                "::test_function_and_argument_are_named[fori]",
                "transforms/test_tracer_errors.py"
                "::test_function_and_argument_are_named[scan]",
            ],
        ),
        Fault(
            jax_faults.loop_does_not_consume_keys_that_it_does_not_use,
            [
                "nn/test_reversible.py"
                "::test_recomputation_with_the_same_key_is_not_reported_as_its_reuse"
                "[stacked]",
            ],
        ),
        Fault(
            jax_faults.loop_can_be_mapped,
            [
                "transforms/test_layout.py"
                "::test_training_is_that_of_one_device_and_keeps_the_layout",
                "transforms/test_layout.py::test_a_train_state_may_be_one_module",
                "transforms/test_layout.py::test_only_one_block_is_gathered_at_a_time",
                "transforms/test_layout.py"
                "::test_gathered_weights_are_not_kept_for_the_backward_pass",
                "transforms/test_layout.py"
                "::test_stacked_in_stacked_has_two_axes_of_depth",
                "transforms/test_layout.py::test_several_processes_train_one_model",
                "transforms/test_layout.py"
                "::test_devices_send_each_other_one_block_and_no_batch",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[batch-bounded-values]",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[batch-bounded-gradient of a batch]",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[batch-bounded-batch of gradients]",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[weight-bounded-values]",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[weight-bounded-gradient of a batch]",
                "loops/test_sharded.py"
                "::test_batch_or_weight_may_be_split_over_explicit_axes"
                "[weight-bounded-batch of gradients]",
                "loops/test_sharded.py::test_batch_within_shard_map[bounded]",
                "loops/test_sharded.py"
                "::test_number_of_steps_may_differ_between_devices"
                "[bounded]",
                "loops/test_sharded.py"
                "::test_shared_array_of_a_loop_whose_steps_differ_is_refused"
                "[bounded]",
                "loops/test_sharded.py"
                "::test_counter_of_a_loop_whose_steps_differ_differs_too"
                "[bounded]",
                "loops/test_sharded.py::test_collectives_over_a_name_of_vmap[bounded]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[vmap of nothing-filter_scan]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[vmap of nothing-while]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests"
                "[vmap of nothing-filter_scan]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[vmap of nothing-while]",
                "loops/test_loop.py::test_is_a_python_loop",
                "loops/test_scan.py::test_map_is_vmap_and_a_python_loop",
                "loops/test_scan.py::test_scan_is_a_python_loop",
                "nn/test_kv_cache.py"
                "::test_cache_is_a_carry_of_scan_and_vmaps_with_lengths_of_its_own",
                "nn/test_costs.py::test_operations_and_bytes_are_those_of_plain_jax"
                "[GRU, 256 steps-forward]",
                "nn/test_costs.py::test_operations_and_bytes_are_those_of_plain_jax"
                "[GRU, 256 steps-gradient]",
                "nn/test_mlp.py::test_ensemble_agrees_with_its_members[True]",
                "nn/test_reversible.py"
                "::test_gradient_for_a_batch_with_a_key_for_each_is_that_of_plain_autodiff"
                "[stacked]",
                "nn/test_shape.py::test_ensemble_is_called_under_filter_vmap[MLP-shape2]",
                "nn/test_stacked.py::test_state_has_a_row_for_each_layer",
                "nn/test_stacked.py"
                "::test_ensemble_called_without_vmap_is_an_error_with_the_fix",
                "transforms/test_invertible.py::test_so_is_that_of_stacked_blocks",
                "loops/test_while_loop.py"
                "::test_condition_of_a_mapped_loop_is_one_for_all[bounded]",
                "loops/test_while_loop.py"
                "::TestHigherDerivatives::test_forward[bounded]",
                "nn/test_peer_models.py::test_model_trains_as_with_equinox[lstm]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order[vmap]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order"
                "[jit of vmap]",
                "runtime/test_progress.py"
                "::test_bar_is_drawn_at_some_steps_and_ends_full[jit of vmap]",
                "loops/test_buffers.py"
                "::test_buffer_is_a_pytree_of_jax_arrays_wherever_users_see_it"
                "[vmap-bounded]",
                "runtime/test_shared_checks.py::test_nan_mode_in_nested_batches_and_loops",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[bf16-scan MLP]",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[bf16-RNN]",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[bf16-Stacked]",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[f16-scan MLP]",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[f16-RNN]",
                "nn/test_conventions.py"
                "::test_gradient_on_ones_is_that_of_float32[f16-Stacked]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[False-scan MLP]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[False-RNN]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[False-Stacked]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[True-scan MLP]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[True-RNN]",
                "nn/test_conventions.py"
                "::test_gradient_is_the_sum_of_those_of_all_examples[True-Stacked]",
            ],
        ),
        Fault(
            jax_faults.compiled_loop_with_nothing_but_a_carry_runs,
            [
                "loops/test_eager.py::test_options_may_be_numbers_of_numpy",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[eager-bounded]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[eager-fori]",
                "loops/test_numbers.py::test_value_is_that_of_a_python_loop[jit-scan]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[jit-scan-checkpoint]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[jit-bounded]",
                "loops/test_numbers.py::test_value_is_that_of_a_python_loop[jit-fori]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[filter_jit-scan]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[filter_jit-scan-checkpoint]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[filter_jit-bounded]",
                "loops/test_numbers.py"
                "::test_value_is_that_of_a_python_loop[filter_jit-fori]",
                "loops/test_numbers.py::test_jax_finds_no_leaked_tracers[scan]",
                "loops/test_numbers.py"
                "::test_jax_finds_no_leaked_tracers[scan-checkpoint]",
                "loops/test_numbers.py::test_jax_finds_no_leaked_tracers[bounded]",
                "loops/test_numbers.py::test_jax_finds_no_leaked_tracers[fori]",
                "loops/test_numbers.py"
                "::test_effects_of_the_unused_trace_do_not_happen[scan]",
                "loops/test_numbers.py"
                "::test_effects_of_the_unused_trace_do_not_happen[scan-checkpoint]",
                "loops/test_numbers.py"
                "::test_effects_of_the_unused_trace_do_not_happen[bounded]",
                "loops/test_numbers.py"
                "::test_effects_of_the_unused_trace_do_not_happen[fori]",
                "loops/test_eager.py::test_function_is_traced_once[fori]",
                "loops/test_buffers.py"
                "::test_within_shard_map_buffer_varies_as_what_is_written[bounded]",
                "loops/test_loop.py::TestErrors"
                "::test_weakly_typed_carry_takes_the_type_of_a_step"
                "[strong-array-bounded]",
                "loops/test_loop.py::TestErrors"
                "::test_weakly_typed_carry_takes_the_type_of_a_step"
                "[strong-number-bounded]",
                "loops/test_loop.py::TestErrors"
                "::test_weakly_typed_carry_takes_the_type_of_a_step"
                "[weak-array-bounded]",
                "loops/test_loop.py::TestErrors"
                "::test_weakly_typed_carry_takes_the_type_of_a_step"
                "[weak-number-bounded]",
                "loops/test_eager.py::test_numbers_of_steps_may_be_arrays",
                "loops/test_eager.py::test_static_values_select_what_is_compiled",
                "loops/test_internal_scan.py"
                "::TestScanTrick::test_function_is_traced_once",
                "loops/test_scan.py"
                "::test_carry_may_hold_anything_that_stays_what_it_is",
                "loops/test_scan.py::test_number_becomes_an_array_where_there_was_one",
                "loops/test_scan.py::test_weak_type_may_be_lost_on_the_way",
                "runtime/test_error_if.py"
                "::test_breakpoint_mode_prints_opens_the_debugger_and_goes_on"
                "[jit of scan]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_from_the_outermost_filter_jit"
                "[filter_scan]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_from_the_outermost_filter_jit[while]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[custom_jvp-filter_scan]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[filter_scan-jit]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[filter_scan-jvp]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[filter_scan-while]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[while-cond]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[while-jit]",
                "runtime/test_error_if.py"
                "::test_failing_check_raises_in_nests[while-jvp]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value[filter_scan]",
                "runtime/test_error_if.py::test_passing_check_changes_no_value[while]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests"
                "[custom_jvp-filter_scan]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[filter_scan-jit]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[filter_scan-jvp]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[filter_scan-while]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[while-cond]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[while-jit]",
                "runtime/test_error_if.py"
                "::test_passing_check_changes_no_value_in_nests[while-jvp]",
                "runtime/test_error_if.py"
                "::test_sharded_arrays_are_checked_on_all_devices[AxisType.Auto]",
                "runtime/test_error_if.py"
                "::test_sharded_arrays_are_checked_on_all_devices[AxisType.Explicit]",
                "nn/test_conventions.py::test_jit_and_vmap_agree_with_the_plain_call"
                "[scan MLP]",
                "nn/test_reversible.py"
                "::test_gradient_of_the_inverse_is_that_of_plain_autodiff[stacked]",
                "nn/test_reversible.py"
                "::test_value_and_gradients_are_those_of_plain_autodiff"
                "[stacked-3-0.5-True]",
                "nn/test_reversible.py::test_what_is_frozen_is_not_trained[blocks-stacked]",
                "nn/test_reversible.py::test_what_is_frozen_is_not_trained[first-stacked]",
                "jit/test_checks.py"
                "::test_check_is_found_in_what_was_traced_before[scan]",
                "transforms/test_invertible.py::test_inverse_is_derived[scan inside]",
                "transforms/test_invertible.py"
                "::test_compiled_check_raises_the_largest_error[False-True]",
                "transforms/test_invertible.py"
                "::test_compiled_check_raises_the_largest_error[True-True]",
                "transforms/test_invertible.py"
                "::test_chain_within_a_shard_map[<lambda>-True]",
                "transforms/test_invertible.py"
                "::test_typed_key_goes_through_the_chain[True]",
                "transforms/test_invertible.py"
                "::test_value_and_gradient_are_those_of_the_plain_chain[jit-stacked]",
                "transforms/test_pmap.py::test_loops_need_no_more_than_under_jax",
                "transforms/test_shard_map.py::test_sum_within_a_loop",
                "nn/test_stacked.py::test_layers_of_one_device_are_scanned",
                "nn/test_peer_models.py::test_model_trains_as_with_equinox[diffusion]",
                "runtime/test_capture.py"
                "::test_output_is_that_of_the_plain_model_bit_for_bit",
                "runtime/test_capture.py"
                "::test_stacked_layers_give_stacked_values[None]",
                "runtime/test_capture.py"
                "::test_stacked_layers_give_stacked_values[True]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order[jit]",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order"
                "[filter_jit]",
                "runtime/test_progress.py::test_meter_of_the_users_own",
                "runtime/test_progress.py::test_meters_are_static",
                "runtime/test_progress.py::test_meters_do_not_mix",
                "runtime/test_progress.py::test_several_devices_have_one_meter",
                "runtime/test_shared_checks.py"
                "::test_the_message_is_that_of_the_check_that_fails[scan]",
                "runtime/test_shared_checks.py"
                "::test_the_message_is_that_of_the_check_that_fails[while]",
            ],
        ),
        Fault(
            jax_faults.compiled_loop_with_nothing_but_a_carry_runs,
            ["jit/test_jit.py::test_call_returns_before_the_computation_ends"],
            sure=False,
        ),
        Fault(
            jax_faults.loop_runs_backwards,
            [
                "nn/test_reversible.py"
                "::test_inverse_undoes_the_call_with_the_same_key[False-stacked]",
                "nn/test_cells.py::test_scan_cell_is_the_loop[True-GRUCell]",
                "nn/test_cells.py::test_scan_cell_is_the_loop[True-LSTMCell]",
                "transforms/test_invertible.py"
                "::test_value_and_gradient_are_those_of_the_plain_chain[eager-stacked]",
            ],
        ),
        Fault(
            jax_faults.carry_of_another_type_is_a_type_error,
            [
                "loops/test_numbers.py::test_no_array_is_kept_alive[eager-scan]",
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive[eager-scan-checkpoint]",
                "loops/test_numbers.py::test_no_array_is_kept_alive[eager-fori]",
                "loops/test_numbers.py::test_no_array_is_kept_alive[jit-scan]",
                "loops/test_numbers.py"
                "::test_no_array_is_kept_alive[jit-scan-checkpoint]",
                "loops/test_numbers.py::test_no_array_is_kept_alive[jit-fori]",
                "loops/test_loop.py"
                "::test_carry_that_is_split_differently_is_named_with_the_fix",
                "loops/test_loop.py"
                "::TestErrors::test_array_that_changes_its_type_is_named[limited]",
                "loops/test_loop.py"
                "::TestErrors::test_array_that_changes_its_type_is_named[plain]",
                "loops/test_scan.py::TestScanErrors"
                "::test_array_that_changes_its_type_is_named_before_and_after",
                "loops/test_scan.py"
                "::test_error_of_a_carry_that_changes_is_at_the_line_of_the_user"
                "[scan]",
                "loops/test_loop.py"
                "::test_numbers_that_change_become_arrays_as_for_jax[limited]",
                "loops/test_loop.py"
                "::test_numbers_that_change_become_arrays_as_for_jax[plain]",
                "loops/test_scan.py::TestScanErrors"
                "::test_number_that_changes_its_type_only_becomes_an_array",
            ],
        ),
        Fault(
            jax_faults.loop_without_steps_runs,
            [
                "loops/test_scan.py::test_scan_without_steps_returns_the_first_carry",
                "nn/test_cells.py::test_default_state_has_the_dtype_that_the_cell_returns",
                "loops/test_internal_scan.py"
                "::test_values_are_those_of_lax_scan[0-checkpointed]",
                "loops/test_internal_scan.py::test_values_are_those_of_lax_scan[0-lax]",
            ],
        ),
        Fault(
            jax_faults.numpy_array_can_be_iterated_over,
            [
                "loops/test_internal_scan.py"
                "::test_values_are_those_of_lax_scan[3-checkpointed]",
                "loops/test_internal_scan.py::test_values_are_those_of_lax_scan[3-lax]",
            ],
        ),
        Fault(
            jax_faults.integer_in_the_carry_has_a_forward_mode,
            [
                "loops/test_loop.py::test_forward_mode_derivative_is_that_of_the_loop",
                "runtime/test_progress.py"
                "::test_lines_are_printed_once_for_all_elements_in_their_order[jvp]",
            ],
        ),
    ],
    "jax_remat3": [
        Fault(
            jax_faults.linear_function_with_a_checkpoint_is_transposed,
            [
                f"nn/test_conventions.py::{test}[{layer}]"
                for test in (
                    "test_gradient_has_an_entry_for_each_parameter",
                    "test_gradients_are_those_of_finite_differences",
                )
                for layer in ("ConvTranspose", "circular ConvTranspose")
            ],
        ),
    ],
    "jax_custom_jvp3": [
        Fault(
            jax_faults.cotangent_that_is_zero_is_not_computed_with,
            ["loops/test_checkpointed.py::test_cotangents_that_are_zero_stay_so"],
        ),
        Fault(
            jax_faults.function_that_needs_values_has_a_rule,
            [
                "transforms/test_custom_rules.py"
                "::test_function_that_needs_values_has_rules_all_the_same"
            ],
        ),
        Fault(
            jax_faults.rule_may_close_over_a_traced_value,
            [
                "transforms/test_custom_vmap.py::TestClosures"
                "::test_rule_is_asked_if_what_is_closed_over_has_no_batch"
            ],
        ),
    ],
    "jax_custom_vjp3": [],
}


def flags_that_are_set() -> list[str]:
    return [flag for flag in FAULTS if getattr(jax.config, flag, False)]


def expected_fault(name: str) -> Fault | None:
    """What makes a test fail under the flags that are set, by its path below `tests/`."""
    for flag in flags_that_are_set():
        for fault in FAULTS[flag]:
            if name in fault.tests or name.split("[")[0] in fault.tests:
                return fault
    return None


if __name__ == "__main__":
    print(*(f"tests/{path}" for path in PATHS))
