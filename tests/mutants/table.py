"""Deliberate defects of the package, and the tests that must catch each of them.

A defect replaces one text, which occurs exactly once in its file, by another. When code moves, move its defect along:
what counts is the promise that it breaks (``docs/guarantees.md``), not where the line stands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One deliberate defect."""

    name: str
    breaks: str
    """The promise that the defect breaks, as ``G1: …``."""
    file: str
    """Under ``src/cloudckpt``."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids of pytest; one of them must fail."""


_COMMIT = (
    Mutant(
        name="commit-without-the-condition",
        breaks="G2: two saves that commit under one number are both told that they won.",
        file="_commit/put.py",
        old="if_absent=conditional)",
        new="if_absent=False)",
        tests=("tests/commit/test_publish.py::test_somebody_else_was_first",),
    ),
    Mutant(
        name="taken-key-is-success",
        breaks="G2: a save whose number another save took is told that it committed.",
        file="_commit/publish.py",
        old="    if isinstance(found, Manifest) and found.attempt == manifest.attempt:\n        return\n    if outcome",
        new="    if isinstance(found, Manifest):\n        return\n    if outcome",
        tests=("tests/commit/test_publish.py::test_somebody_else_was_first",),
    ),
    Mutant(
        name="believe-a-refusal",
        breaks="G10: a proxy that refuses the commit it has passed on makes the save delete what it committed.",
        file="_commit/publish.py",
        old="    found, is_absent = _entry_at(store, number, retrier)",
        new="    if outcome.is_refused:\n        raise error\n    found, is_absent = _entry_at(store, number, retrier)",
        tests=("tests/commit/test_publish.py::test_a_refusal_of_what_has_arrived_is_a_commit",),
    ),
    Mutant(
        name="lost-answer-is-failure",
        breaks="G3: a commit whose answer was lost counts as refused, and its data is deleted.",
        file="_commit/put.py",
        old="may_have_arrived = may_have_arrived or not error.had_no_effect",
        new="may_have_arrived = False",
        tests=("tests/commit/test_publish.py::test_a_refusal_after_a_lost_answer_is_not_the_whole_truth",),
    ),
    Mutant(
        name="commit-below-an-overwrite-counts",
        breaks="G2: a save reports success although a higher commit, put meanwhile, hides it.",
        file="_commit/publish.py",
        old="        if log.top > number:\n",
        new="        if False:\n",
        tests=("tests/commit/test_publish.py::test_a_higher_number_counts",),
    ),
    Mutant(
        name="highest-number-by-its-text",
        breaks="G1: readers take manifest.9 for newer than manifest.10.",
        file="_commit/resolve.py",
        old="key=lambda entry: entry.number))",
        new="key=lambda entry: str(entry.number)))",
        tests=("tests/commit/test_publish.py::test_the_highest_number_counts",),
    ),
    Mutant(
        name="skip-the-fence-of-gc",
        breaks="G1: a save whose data gc removed can still commit.",
        file="_commit/collect.py",
        old="is_fenced = plan.needs_fence and conditional",
        new="is_fenced = False",
        tests=(
            "tests/housekeeping/test_trouble.py::test_a_save_whose_data_goes_at_the_last_moment_cannot_be_committed",
        ),
    ),
    Mutant(
        name="one-look-decides-what-gc-removes",
        breaks="G10: gc removes the data of a checkpoint for which a proxy answered with another one's manifest.",
        file="_commit/collect.py",
        old="if item in agreed))",
        new="))",
        tests=("tests/housekeeping/test_trouble.py::test_another_manifest_in_one_answer_removes_nothing",),
    ),
    Mutant(
        name="skip-the-fence-of-delete",
        breaks="G1: a save that began before a deletion can still commit after it, without its data.",
        file="housekeeping.py",
        old="was_there |= delete_checkpoint(place, retrier, conditional=conditional)",
        new="was_there |= delete_checkpoint(place, retrier, conditional=False)",
        tests=("tests/housekeeping/test_trouble.py::test_a_deletion_that_a_save_overtakes_leaves_the_save_alone",),
    ),
    Mutant(
        name="delete-data-before-the-manifest",
        breaks="G1: a deletion that dies in the middle leaves a manifest whose data is gone.",
        file="_commit/remove.py",
        old="""\
        [place.prefix + manifest_key(number) for number in doomed],
        sorted(item.key for item in place.found if item.kind == "data"),
""",
        new="""\
        sorted(item.key for item in place.found if item.kind == "data"),
        [place.prefix + manifest_key(number) for number in doomed],
""",
        tests=("tests/manager/test_manager.py::test_the_manifest_goes_first_and_only_after_the_commit",),
    ),
    Mutant(
        name="replaced-data-before-its-manifest",
        breaks="G1: an overwrite that dies while it tidies up leaves an older manifest without its data.",
        file="_commit/publish.py",
        old="(*batches(entries), *batches(keys))",
        new="(*batches(keys), *batches(entries))",
        tests=("tests/commit/test_publish.py::test_what_was_replaced_is_removed_lowest_first",),
    ),
    Mutant(
        name="overwrite-removes-the-new-data",
        breaks="G2: an overwrite that takes up objects of the old checkpoint deletes them with it.",
        file="_commit/publish.py",
        old="for key in _data_keys(store, n, retrier) if key not in kept]",
        new="for key in _data_keys(store, n, retrier)]",
        tests=("tests/commit/test_publish.py::test_shared_data_is_kept",),
    ),
    Mutant(
        name="tidying-up-after-a-later-commit",
        breaks="G1: an overwrite that was itself overwritten deletes entries that it must not judge.",
        file="_commit/publish.py",
        old="if log.counting != number:",
        new="if False:",
        tests=("tests/commit/test_publish.py::test_a_clean_up_that_comes_too_late_does_nothing",),
    ),
    Mutant(
        name="skip-the-last-look",
        breaks="G3: a save commits although an object of it is gone.",
        file="_pipeline/save.py",
        old="check_objects_present(context.store, manifest, context.retrier)",
        new="pass",
        tests=("tests/housekeeping/test_trouble.py::test_a_save_that_gc_took_for_dead_fails_and_says_why",),
    ),
    Mutant(
        name="last-look-ignores-sizes",
        breaks="G3: a save commits although an object of it is shorter than what was written.",
        file="_commit/present.py",
        old="if found.get(key) != size_bytes and",
        new="if key not in found and",
        tests=("tests/housekeeping/test_trouble.py::test_a_save_whose_object_was_cut_is_not_committed",),
    ),
    Mutant(
        name="unknown-commit-removes-its-data",
        breaks="G3: after a commit with an unknown outcome the data of a visible checkpoint is deleted.",
        file="_pipeline/save.py",
        old="""\
        except CommitUnknownError:
            raise""",
        new="""\
        except CommitUnknownError:
            self._remove(keys)
            raise""",
        tests=("tests/test_writer.py::test_an_unknown_outcome_keeps_the_data",),
    ),
    Mutant(
        name="discard-without-a-look-at-commits",
        breaks="G1: a rank that is told of a failure after the commit deletes the checkpoint's data.",
        file="_pipeline/save.py",
        old="if keys and not self._may_be_committed(keys):",
        new="if keys:",
        tests=("tests/test_reuse.py::test_discard_keeps_what_a_commit_refers_to",),
    ),
    Mutant(
        name="overwrite-unasked",
        breaks="G2: a save replaces a checkpoint without overwrite=True.",
        file="_pipeline/save.py",
        old="if log.counting is not None or any(others):",
        new="if any(others):",
        tests=("tests/test_writer.py::test_nothing_moves_where_a_checkpoint_lies",),
    ),
    Mutant(
        name="cached-plan-writes-old-keys",
        breaks="G1: a save with a cached plan writes to the keys of an older save.",
        file="_pipeline/save.py",
        old="isinstance(ticket, Ticket) and ticket.nonce == self.ticket.nonce and ticket.attempt is not None",
        new="isinstance(ticket, Ticket) and ticket.attempt is not None",
        tests=("tests/test_writer.py::test_cached_plans_write_new_keys_and_real_types",),
    ),
)

_HOUSEKEEPING = (
    Mutant(
        name="gc-ignores-older-than",
        breaks="G5: gc removes what a save that is under way has written.",
        file="_commit/garbage.py",
        old="return lives.get(item.attempt, item.moment) < before",
        new="return True",
        tests=("tests/housekeeping/test_gc_on_stores.py::test_what_is_young_stays",),
    ),
    Mutant(
        name="gc-removes-referenced-data",
        breaks="G1: gc deletes data that the manifest which counts names.",
        file="_commit/garbage.py",
        old="and item.key not in named and is_dead(item)",
        new="and is_dead(item)",
        tests=("tests/housekeeping/test_gc_on_stores.py::test_exactly_the_litter_goes",),
    ),
    Mutant(
        name="gc-removes-data-under-its-manifest",
        breaks="G1: gc deletes the data of a manifest that it could not delete.",
        file="_commit/collect.py",
        old="if left_of_log:",
        new="left += left_of_log\n    if False:",
        tests=("tests/housekeeping/test_trouble.py::test_a_manifest_that_cannot_be_removed_keeps_its_data",),
    ),
    Mutant(
        name="gc-writes-in-a-dry-run",
        breaks="G5: a dry run of gc removes objects.",
        file="housekeeping.py",
        old="            if self._dry_run:\n                plan",
        new="            if False:\n                plan",
        tests=("tests/housekeeping/test_gc_on_stores.py::test_a_dry_run_says_what_would_go_and_touches_nothing",),
    ),
)

_FORMAT = (
    Mutant(
        name="manifest-checksum-not-compared",
        breaks="G4: a damaged manifest is read as if it were whole.",
        file="_manifest/codec.py",
        old="if recorded != actual:",
        new="if False:",
        tests=("tests/manifest/test_codec.py::test_no_flipped_bit_is_accepted",),
    ),
    Mutant(
        name="newer-format-is-read",
        breaks="G4: a checkpoint of a newer format is read by rules that no longer hold.",
        file="_manifest/codec.py",
        old="if version[0] > FORMAT_MAJOR:",
        new="if version[0] > FORMAT_MAJOR + 1:",
        tests=("tests/manifest/test_codec.py::test_a_newer_major_version_asks_for_an_upgrade",),
    ),
    Mutant(
        name="key-with-two-dots",
        breaks="G6: a key of a manifest leads out of the checkpoint.",
        file="_manifest/validate.py",
        old='segment not in ("", ".", "..")',
        new='segment not in ("", ".")',
        tests=("tests/manifest/test_hostile.py::test_hostile_manifests_are_refused",),
    ),
    Mutant(
        name="range-beyond-its-object",
        breaks="G6: a manifest makes a reader ask for bytes beyond an object.",
        file="_manifest/validate.py",
        old="stored.begin <= stored.end <= objects[stored.object_index].size:",
        new="stored.begin <= stored.end:",
        tests=("tests/manifest/test_hostile.py::test_hostile_manifests_are_refused",),
    ),
    Mutant(
        name="chunks-may-leave-holes",
        breaks="G4: a manifest whose chunks leave a hole, or overlap, is taken for whole.",
        file="_manifest/validate.py",
        old="if in_place and not fills_once(",
        new="if False and not fills_once(",
        tests=("tests/manifest/test_hostile.py::test_hostile_manifests_are_refused",),
    ),
    Mutant(
        name="planned-is-taken-for-written",
        breaks="G3: a save commits although planned items were not written.",
        file="_manifest/build.py",
        old="    if missing:\n",
        new="    if False:\n",
        tests=("tests/manifest/test_torch_metadata.py::test_each_missing_item_is_named",),
    ),
    Mutant(
        name="written-in-another-shape",
        breaks="G3: a chunk that was written in another shape than planned is committed.",
        file="_manifest/build.py",
        old="if item is None or item[4] != chunk.sizes:",
        new="if item is None:",
        tests=("tests/manifest/test_torch_metadata.py::test_another_shape_than_planned_is_refused",),
    ),
    Mutant(
        name="planned-dtype-for-the-written-one",
        breaks="G4: bytes are read as another dtype than they were written.",
        file="_manifest/build.py",
        old="dtype=dtype or dtype_name(entry.properties.dtype),",
        new="dtype=dtype_name(entry.properties.dtype),",
        tests=("tests/manifest/test_torch_metadata.py::test_the_dtype_that_was_written_counts",),
    ),
    Mutant(
        name="verify-ignores-added-bytes",
        breaks="G4: verify passes an object to which bytes were added.",
        file="_pipeline/verify.py",
        old="if size_bytes > stored.size:",
        new="if False:",
        tests=("tests/integrity/test_every_damage.py::test_every_appended_byte_is_found",),
    ),
)

_UPLOAD = (
    Mutant(
        name="drop-the-last-tiles-checksum",
        breaks="G4: the last tile of an object has no checksum, so that damage in it is not found.",
        file="_transfer/checksum.py",
        old="    if filled_bytes:\n",
        new="    if False:\n",
        tests=("tests/transfer/test_checksum.py::test_tiles_are_cut_across_views",),
    ),
    Mutant(
        name="checksums-in-the-order-of-arrival",
        breaks="G4: the checksums of an object's tiles are recorded in the order in which its parts arrived.",
        file="_transfer/upload.py",
        old="tuple(value for part in target.parts for value in target.crc32cs[part.number])",
        new="tuple(value for values in target.crc32cs.values() for value in values)",
        tests=("tests/transfer/test_upload.py::test_checksums_stay_with_their_tiles_where_parts_overtake_each_other",),
    ),
    Mutant(
        name="swallow-an-upload-threads-error",
        breaks="G3: a save succeeds without the objects whose upload failed.",
        file="_transfer/upload.py",
        old="""\
        if self._failure is not None:
            raise self._failure
        return [self._receipts[key] for key in self._started_keys]""",
        new="""\
        return [self._receipts[key] for key in self._started_keys if key in self._receipts]""",
        tests=("tests/transfer/test_upload.py::test_a_failure_after_the_last_submission_is_raised_at_the_end",),
    ),
    Mutant(
        name="publish-a-short-object",
        breaks="G3: an object that is shorter than what was uploaded is taken for whole.",
        file="_transfer/upload.py",
        old="if stored_bytes != size_bytes:",
        new="if False:",
        tests=("tests/transfer/test_upload.py::test_a_completion_that_shows_another_size_is_no_success",),
    ),
    Mutant(
        name="leave-an-upload-open",
        breaks="G5: a failed save leaves an unfinished multipart upload.",
        file="_transfer/upload.py",
        old="self._cleaner.call(functools.partial(self._store.abort_multipart, target.key, target.upload_id))",
        new="pass",
        tests=("tests/transfer/test_upload.py::test_what_fails_for_good_leaves_nothing",),
    ),
    Mutant(
        name="leave-the-objects-of-a-failed-save",
        breaks="G5: a failed save leaves the objects that it wrote.",
        file="_transfer/upload.py",
        old="self._cleaner.call(lambda: self._store.delete(self._started_keys))",
        new="pass",
        tests=("tests/transfer/test_upload.py::test_an_error_between_two_objects_removes_the_first",),
    ),
    Mutant(
        name="resume-without-comparing-objects",
        breaks="G4: a resumed save takes up an object that holds other bytes.",
        file="_transfer/resume.py",
        old="if not _are_same(stored, views):",
        new="if False:",
        tests=("tests/transfer/test_resume.py::test_an_object_that_differs_in_one_bit_is_not_taken",),
    ),
    Mutant(
        name="never-retry",
        breaks="G3: one request that fails in passing fails the save on every rank.",
        file="_transfer/retry.py",
        old="if num_failures > self._retries or",
        new="if True or",
        tests=("tests/transfer/test_retry.py::test_what_may_pass_is_tried_again",),
    ),
    Mutant(
        name="retry-what-is-final",
        breaks="G2: a put that was refused because the key is taken is sent again.",
        file="_transfer/retry.py",
        old="if not isinstance(error, (TransientStoreError, ChecksumRefusedError)):",
        new="if not isinstance(error, StoreError):",
        tests=("tests/transfer/test_retry.py::test_what_will_not_pass_is_raised_at_once",),
    ),
    Mutant(
        name="lose-a-threads-exception",
        breaks="G3: what fails in a worker thread is taken for done.",
        file="_workers.py",
        old="            error = caught\n",
        new="            error = None\n",
        tests=("tests/integrity/test_in_flight.py::test_three_bad_reads_are_damage",),
    ),
)

_DOWNLOAD = (
    Mutant(
        name="load-without-verification",
        breaks="G4: a load does not compare the bytes that it reads with their checksums.",
        file="_pipeline/load.py",
        old="if context.options.verify:",
        new="if False:",
        tests=("tests/integrity/test_in_flight.py::test_three_bad_reads_are_damage",),
    ),
    Mutant(
        name="skip-the-verification-of-the-last-tile",
        breaks="G4: damage in the last tile of a read is not found.",
        file="_transfer/download.py",
        old="for index, value in enumerate(actual) if value != expected[index]]",
        new="for index, value in enumerate(actual[:-1]) if value != expected[index]]",
        tests=("tests/transfer/test_download.py::test_the_short_last_tile_is_checked_too",),
    ),
    Mutant(
        name="resume-a-read-at-its-beginning",
        breaks="G4: a body that breaks off goes on with the bytes from its beginning.",
        file="_transfer/download.py",
        old="position += error.received_bytes",
        new="pass",
        tests=("tests/transfer/test_download.py::test_a_read_that_breaks_off_goes_on_at_the_byte_reached",),
    ),
    Mutant(
        name="hedged-read-overwrites-the-answer",
        breaks="G4: a second request that loses writes into tensors that the first one has filled.",
        file="_transfer/hedged.py",
        old="self._inner.read_into(key, offset_bytes, [content])",
        new="self._inner.read_into(key, offset_bytes, views)",
        tests=("tests/transfer/test_hedging.py::test_a_range_comes_whole_from_the_second_request",),
    ),
    Mutant(
        name="hedged-loser-is-not-waited-for",
        breaks="G4: a request that lost still reads or writes memory after its caller went on.",
        file="_transfer/hedging.py",
        old="hedge.has_ended.wait()",
        new="pass",
        tests=(
            "tests/transfer/test_hedging.py::test_the_first_request_counts_if_it_ends_first_and_the_second_has_ended_then",
        ),
    ),
    Mutant(
        name="load-that-ends-early-is-a-success",
        breaks="G3: a load succeeds although some tensors were not read.",
        file="_pipeline/finish.py",
        old="if num_left or any(outstanding):",
        new="if False:",
        tests=("tests/dcp/test_load_items.py::test_a_load_that_ends_early_is_no_success",),
    ),
    Mutant(
        name="read-past-the-object",
        breaks="G8: a read of the last tile asks for bytes beyond the object.",
        file="_plan/reads.py",
        old="min(end, object_sizes_bytes[object_index])",
        new="end",
        tests=("tests/plan/test_reads.py::test_every_wanted_byte_comes_once",),
    ),
    Mutant(
        name="read-less-than-the-last-tile",
        breaks="G4: the last wanted bytes of a range are not read.",
        file="_plan/reads.py",
        old="high = -(-want.end // tile_bytes) * tile_bytes",
        new="high = want.end // tile_bytes * tile_bytes",
        tests=("tests/plan/test_reads.py::test_a_long_range_is_split_and_its_wants_are_named_in_each_piece",),
    ),
    Mutant(
        name="coalesce-off-by-one",
        breaks="G8: ranges exactly max_gap_bytes apart are not read as one.",
        file="_plan/reads.py",
        old="low - end > max_gap_bytes:",
        new="low - end >= max_gap_bytes:",
        tests=("tests/plan/test_reads.py::test_near_ranges_are_read_as_one_and_far_ones_apart",),
    ),
    Mutant(
        name="over-read-without-a-budget",
        breaks="G8: a load reads more unwanted bytes than max_over_read allows.",
        file="_plan/gaps.py",
        old="budget_bytes -= gap_bytes",
        new="pass",
        tests=("tests/plan/test_reads.py::test_the_smallest_gaps_are_read_first_and_as_many_as_the_share_allows",),
    ),
)

_DCP = (
    Mutant(
        name="reader-mixes-two-attempts",
        breaks="G1: ranks that found different saves load a mixture.",
        file="reader.py",
        old="if len(attempts) > 1:",
        new="if False:",
        tests=("tests/test_reader_writer.py::test_ranks_that_found_different_saves_load_neither",),
    ),
    Mutant(
        name="pickle-without-consent",
        breaks="G6: a value of a checkpoint is unpickled without weights_only.",
        file="_pipeline/finish.py",
        old="if self._allow_pickle:",
        new="if True:",
        tests=("tests/integrity/test_malicious.py",),
    ),
    Mutant(
        name="unpickle-everything",
        breaks="G6: Python objects are loaded under weights_only=False.",
        file="_stage/values.py",
        old="        return load_safely(stored)\n",
        new="        return torch.load(io.BytesIO(stored), weights_only=False)\n",
        tests=("tests/e2e/test_safety.py",),
    ),
    Mutant(
        name="unpickle-any-name",
        breaks="G6: a pickle can refer to any function of any module, which is imported for it.",
        file="_stage/unpickling.py",
        old='        raise _refusal(f"it uses {full}")\n',
        new="        return super().find_class(module, name)\n",
        tests=("tests/stage/test_values.py::test_hostile_opcodes_are_refused",),
    ),
    Mutant(
        name="torch-metadata-without-consent",
        breaks="G6: the .metadata of torch's own writer is unpickled without allow_pickle.",
        file="reader.py",
        old="self._registry, allow_pickle=self._allow_pickle",
        new="self._registry, allow_pickle=True",
        tests=("tests/integrity/test_malicious.py",),
    ),
    Mutant(
        name="load-another-shape",
        breaks="G4: a tensor is filled from a stored one of another shape.",
        file="_dcp/load_planner.py",
        old="if size == stored.shape and 0 not in size:",
        new="if 0 not in size:",
        tests=("tests/dcp/test_load_planner.py::test_another_shape_is_refused",),
    ),
    Mutant(
        name="two-reads-into-one-memory",
        breaks="G4: tied tensors are filled by two reads at once, each of which sees the other's bytes.",
        file="_pipeline/consumers.py",
        old="self.wholes.copy_instead(position for position in found if position < num_whole)",
        new="self.wholes.copy_instead(())",
        tests=("tests/dcp/test_load_items.py::test_what_shares_memory_is_not_filled_by_two_reads_at_once",),
    ),
    Mutant(
        name="save-report-counts-too-much",
        breaks="G9: the report of a save counts bytes that were not sent.",
        file="_pipeline/save.py",
        old="sum(receipt.size_bytes for receipt in written.objects) - written.num_reused_bytes,",
        new="sum(receipt.size_bytes for receipt in written.objects),",
        tests=("tests/e2e/test_resume.py::test_all_is_there_already",),
    ),
    Mutant(
        name="load-report-counts-too-little",
        breaks="G9: the report of a load says that no byte too many was read.",
        file="_pipeline/load.py",
        old="num_bytes_read=sum(request.num_bytes for request in requests) + shares.num_bytes_missed,",
        new="num_bytes_read=consumers.num_bytes,",
        tests=("tests/docs/test_claims.py::test_reports_add_up",),
    ),
)

_SHARE = (
    Mutant(
        name="load-unchecked-what-another-rank-read",
        breaks="G4: bytes that are damaged between two ranks are loaded.",
        file="_pipeline/load.py",
        old="if is_whole and self._context.options.verify:",
        new="if False:",
        tests=("tests/e2e/test_read_once.py::test_bytes_that_are_damaged_between_ranks_are_read_again",),
    ),
    Mutant(
        name="overwrite-a-segment-that-a-rank-still-needs",
        breaks="G4: a rank copies the bytes of another segment.",
        file="_share/exchange.py",
        old="if peer.needs(segment.number):",
        new="if False:",
        tests=(
            "tests/share/test_exchange.py::test_all_that_is_published_arrives_through_a_ring_much_smaller",
            "tests/share/test_exchange.py::test_what_a_rank_has_not_copied_yet_keeps_its_place",
        ),
    ),
    Mutant(
        name="reuse-a-place-unmarked",
        breaks="G4: a rank that hung and goes on copies the bytes of another segment.",
        file="_share/exchange.py",
        old="self._ring.set_state(segment.number, FAILED)\n                        self._reserved",
        new="self._reserved",
        tests=(
            "tests/share/test_exchange.py::test_a_rank_that_hangs_is_given_up_and_gets_no_wrong_bytes_when_it_goes_on",
        ),
    ),
    Mutant(
        name="wait-for-a-rank-that-has-left",
        breaks="G3: a rank waits for the bytes of one that has failed.",
        file="_share/exchange.py",
        old="self.is_gone = self.ring.has_left or has_ended",
        new="self.is_gone = has_ended",
        tests=("tests/share/test_exchange.py::test_a_rank_that_leaves_is_not_waited_for",),
    ),
)

_SCHEDULES = (
    "tests/ranks/test_schedules.py::test_ranks_that_meet_between_saves_make_the_next_one_after_whatever_went_wrong"
)
"""Ranks on a simulated clock, so that a rank that waits without end takes no time."""

_RANKS = (
    Mutant(
        name="begin-before-all-ranks-are-there",
        breaks="G3: a collective begins although a rank is missing, and waits for the process group's own timeout.",
        file="_ranks/meetings.py",
        old="return len(signs) == self.num_ranks - 1 and all(",
        new="return all(",
        tests=(f"{_SCHEDULES}[misses is late is slow]",),
    ),
    Mutant(
        name="forget-a-rank-that-left",
        breaks="G3: a rank that left the call with an error is waited for as if it still came.",
        file="_ranks/signs.py",
        old="return (gone, LEFT) if gone else None",
        new="return None",
        tests=(f"{_SCHEDULES}[leaves drops is interrupted]",),
    ),
    Mutant(
        name="wait-for-a-silent-rank",
        breaks="G3: a rank that hangs is waited for without end.",
        file="_ranks/waiting.py",
        old="if silent:",
        new="if False:",
        tests=(f"{_SCHEDULES}[misses is late is slow]",),
    ),
    Mutant(
        name="ranks-with-different-calls-go-on",
        breaks="G1: ranks that save to different URIs make one save together.",
        file="_ranks/signs.py",
        old="if apart:",
        new="if False:",
        tests=(f"{_SCHEDULES}[differs is slow]",),
    ),
    Mutant(
        name="heartbeat-without-a-beat",
        breaks="G3: a rank that is slow but alive is given up.",
        file="_ranks/notices.py",
        old="beat=self.mine.beat + 1)",
        new="beat=self.mine.beat)",
        tests=(f"{_SCHEDULES}[dies leaves is slow]",),
    ),
)

_TENSORS = (
    Mutant(
        name="snapshot-aliases-live-memory",
        breaks="G4: a background save writes values that training changed after the call.",
        file="_stage/laying.py",
        old="copied = block.tensor(offset, tensor, as_whole=whole)",
        new="copied = tensor",
        tests=("tests/stage/test_stager.py::test_what_changes_afterwards_is_not_in_the_copy",),
    ),
    Mutant(
        name="snapshot-reused-for-another-layout",
        breaks="G4: a snapshot is filled by the copy plan of tensors that have changed since.",
        file="_stage/stager.py",
        old="if not kept.are_alike(leaves.tensors):",
        new="if False:",
        tests=("tests/stage/test_stager_again.py::test_each_change_alone_is_seen",),
    ),
    Mutant(
        name="reuse-a-snapshot-that-is-still-saved",
        breaks="G4: the memory of a snapshot is overwritten while it is still uploaded.",
        file="_stage/memory.py",
        old="if reuse_lent or not block.is_lent]",
        new="if True]",
        tests=(
            "tests/stage/test_stager_memory.py::test_a_copy_that_is_still_in_use_is_not_overwritten_by_torchs_next_save",
        ),
    ),
    Mutant(
        name="failed-copy-counts-as-complete",
        breaks="G3: a snapshot whose copy failed is saved as if it were whole.",
        file="_stage/crew.py",
        old="self._staging.end(self._error)",
        new="self._staging.end(None)",
        tests=("tests/stage/test_stager_copying.py::test_a_copy_that_fails_ends_all_waiting",),
    ),
    Mutant(
        name="send-before-it-is-copied",
        breaks="G4: a part of a background save is sent before its memory is filled.",
        file="_stage/body.py",
        old="self._filled.wait(piece.address + low, high - low)",
        new="pass",
        tests=("tests/stage/test_body.py::test_only_what_a_part_holds_is_waited_for",),
    ),
    Mutant(
        name="reuse-a-buffer-that-is-still-sent",
        breaks="G4: the staging buffer of a part is lent again while its upload still reads it.",
        file="_stage/arena.py",
        old="                    return self._free.pop(smallest)\n",
        new="                    return self._free[smallest]\n",
        tests=("tests/stage/test_arena.py::test_many_threads_stay_within_the_budget_and_come_to_an_end",),
    ),
    Mutant(
        name="staging-without-a-budget",
        breaks="G7: copies of tensors take more memory than staging_bytes.",
        file="_stage/arena.py",
        old="if self._held_bytes + num_bytes <= self._budget_bytes or self._num_lent == 0:",
        new="if True:",
        tests=("tests/stage/test_arena.py::test_many_threads_stay_within_the_budget_and_come_to_an_end",),
    ),
    Mutant(
        name="bytes-into-a-negated-view",
        breaks="G4: bytes are read into memory that holds the negatives of a tensor's values.",
        file="_stage/wholes.py",
        old="        and not tensor.is_neg()\n",
        new="",
        tests=("tests/stage/test_wholes.py::test_tensors_whose_memory_is_not_their_bytes_are_left",),
    ),
    Mutant(
        name="bytes-into-another-dtype",
        breaks="G4: bytes of one dtype are read into a tensor of another.",
        file="_stage/targets.py",
        old="if holds_only_wanted and self._target.dtype == self._dtype and",
        new="if holds_only_wanted and",
        tests=("tests/stage/test_targets.py::test_types_are_converted_as_torch_does",),
    ),
    Mutant(
        name="scatter-from-a-wrong-offset",
        breaks="G4: what several tensors want of one read is copied from the wrong place.",
        file="_stage/scatter.py",
        old="source.content[begin - source.begin : end - source.begin]",
        new="source.content[: end - begin]",
        tests=(
            "tests/stage/test_targets.py::test_what_several_want_is_read_into_one_and_copied",
            "tests/stage/test_targets.py::test_every_block_gets_exactly_its_bytes",
        ),
    ),
)

_STORES = (
    Mutant(
        name="s3-put-without-the-condition",
        breaks="G2: the commit on S3 replaces another one.",
        file="stores/s3/store.py",
        old='{"IfNoneMatch": "*"} if if_absent else {}',
        new="{}",
        tests=("tests/stores/s3/test_requests.py::test_create_if_absent_is_a_condition_of_the_store",),
    ),
    Mutant(
        name="gcs-put-without-the-condition",
        breaks="G2: the commit on GCS replaces another one.",
        file="stores/gcs/uploading.py",
        old='{"ifGenerationMatch": "0"} if if_absent else {}',
        new="{}",
        tests=("tests/stores/gcs/test_requests.py::test_create_if_absent_is_a_condition_of_the_store",),
    ),
    Mutant(
        name="local-put-replaces",
        breaks="G2: the commit on a path replaces another one.",
        file="stores/local/durable.py",
        old="        _link(temp, path)\n",
        new="        os.replace(temp, path)\n",
        tests=("tests/stores/test_local.py::TestContract::test_create_if_absent_refuses_what_exists",),
    ),
    Mutant(
        name="local-put-without-fsync",
        breaks="G1: a manifest survives a crash of the machine, and data that it names does not.",
        file="stores/local/durable.py",
        old="        os.fsync(file)\n",
        new="        pass\n",
        tests=("tests/stores/test_local.py::test_a_put_is_durable_before_it_returns",),
    ),
    Mutant(
        name="local-name-without-fsync",
        breaks="G1: a file whose save was confirmed has no name after a crash of the machine.",
        file="stores/local/durable.py",
        old="            fsync_directory(directory)\n",
        new="            pass\n",
        tests=("tests/stores/test_local.py::test_a_put_is_durable_before_it_returns",),
    ),
    Mutant(
        name="s3-lists-the-first-page-alone",
        breaks="G1: manifests on a later page of a listing do not count.",
        file="stores/s3/listing.py",
        old="        if not is_truncated:\n            return\n        next_token",
        new="        return\n        next_token",
        tests=("tests/stores/s3/test_requests.py::test_listings_go_on_over_pages",),
    ),
    Mutant(
        name="s3-denial-is-absence",
        breaks="G3: a 403 without a body reads as if there were no object.",
        file="stores/s3/errors.py",
        old="403: DENIED,",
        new="403: NOTHING,",
        tests=("tests/stores/s3/test_errors.py::test_answers_follow_what_a_handler_would_do",),
    ),
    Mutant(
        name="local-denial-is-absence",
        breaks="G3: a file that may not be read counts as one that is not there.",
        file="stores/local/errors.py",
        old="errno.EACCES: (AccessDeniedError,",
        new="errno.EACCES: (ObjectNotFoundError,",
        tests=("tests/stores/test_local.py::TestBadPlaces::test_a_failing_put_says_what_to_do_and_leaves_nothing",),
    ),
    Mutant(
        name="s3-put-without-a-checksum",
        breaks="G4: S3 does not check the bytes of an object that is put whole.",
        file="stores/s3/store.py",
        old="            ChecksumCRC32C=_encoded(crc32c),\n            **condition,",
        new="            **condition,",
        tests=("tests/stores/s3/test_requests.py::test_bodies_go_out_unsigned_whole_and_with_their_checksum",),
    ),
    Mutant(
        name="keys-lead-out-of-the-root",
        breaks="G6: a key with '..' leads out of a store's root.",
        file="stores/_body.py",
        old='"." in segments or ".." in segments',
        new='"." in segments',
        tests=("tests/stores/test_memory.py::TestContract::test_keys_that_could_leave_the_root_are_refused",),
    ),
    Mutant(
        name="other-bytes-than-asked-for",
        breaks="G4: an answer that holds another range of an object is taken for the one asked for.",
        file="stores/_http_reading.py",
        old="    if (begin, end) != (offset_bytes, end_bytes):",
        new="    if False:",
        tests=("tests/stores/s3/test_failures.py::TestBodies",),
    ),
    Mutant(
        name="cut-body-is-whole",
        breaks="G4: a response that ends early counts as complete.",
        file="stores/_http_reading.py",
        old="        if reader.fill(views):\n            return\n",
        new="        reader.fill(views)\n        return\n",
        tests=("tests/stores/s3/test_failures.py::TestBodies",),
    ),
)

_MANAGER = (
    Mutant(
        name="keep-the-oldest-steps",
        breaks="G1: retention removes the newest checkpoints.",
        file="_manager/rule.py",
        old='info.uri.rpartition("/")[2]), reverse=True)',
        new='info.uri.rpartition("/")[2]))',
        tests=("tests/manager/test_rule.py::test_the_order_is_that_of_the_commits",),
    ),
    Mutant(
        name="keep-the-worst-steps",
        breaks="G1: keep_best removes the best checkpoint.",
        file="_manager/rule.py",
        old='(1 if mode == "min" else -1)',
        new='(-1 if mode == "min" else 1)',
        tests=("tests/manager/test_rule.py",),
    ),
    Mutant(
        name="damaged-step-counts-as-kept",
        breaks="G4: a damaged checkpoint stands in for a whole one, which is removed.",
        file="_manager/rule.py",
        old="[info for info in newest_first(steps) if info.uri not in damaged]",
        new="newest_first(steps)",
        tests=("tests/manager/test_rule.py",),
    ),
    Mutant(
        name="remove-what-was-just-committed",
        breaks="G1: retention removes the checkpoint that this job committed last, because a clock went back.",
        file="_manager/rule.py",
        old="latest[: policy.keep_last]} | {own}",
        new="latest[: policy.keep_last]}",
        tests=("tests/manager/test_manager.py::test_what_was_just_committed_stays_whatever_the_clock_says",),
    ),
    Mutant(
        name="remove-what-is-being-overwritten",
        breaks="G2: retention removes a checkpoint under a save that replaces it.",
        file="_manager/removal.py",
        old="if _is_written_to(place, retrier, alive_since=alive_since):",
        new="if False:",
        tests=("tests/manager/test_manager.py::test_what_is_being_overwritten_is_left_alone",),
    ),
    Mutant(
        name="denied-step-is-no-step",
        breaks="G4: a restore passes over the newest step because it may not be looked at.",
        file="_manager/steps.py",
        old="                found[name] = Seen(uri=self.at(name), denied=error)",
        new="                pass",
        tests=("tests/manager/test_manager.py::test_a_step_that_may_not_be_looked_at_is_not_passed_over",),
    ),
    Mutant(
        name="one-look-finds-no-other-form",
        breaks="G10: one listing that lacks a step of torch's writer, or of the other mode, is a fresh start.",
        file="_manager/steps.py",
        old="        found = settle(look_at_all, changing=self._changing)",
        new="        found, _ = look_at_all()",
        tests=("tests/manager/test_manager.py::test_one_listing_that_lacks_the_other_form_is_no_fresh_start",),
    ),
    Mutant(
        name="trouble-is-damage",
        breaks="G4: load_latest goes back to an older checkpoint because the store did not answer.",
        file="newest.py",
        old="_SKIPPED = (CorruptCheckpointError, CheckpointNotFoundError)",
        new="_SKIPPED = (Exception,)",
        tests=("tests/integrity/test_newest.py::test_trouble_with_the_store_is_not_damage",),
    ),
    Mutant(
        name="forget-a-failed-background-save",
        breaks="G3: the failure of a background save whose handle nobody asks is never raised.",
        file="_background/in_flight.py",
        old="if error is None or handle.cancelled():",
        new="if True:",
        tests=("tests/test_background.py::test_a_failure_that_nobody_has_seen_is_raised_by_the_next_save",),
    ),
    Mutant(
        name="believe-the-services-copy",
        breaks="G4: a copy that the service made is committed although its checksum differs.",
        file="_convert/copy_job.py",
        old="if said == combined(unpack_tiles(stored.crc32c), tile_bytes=tile_bytes, size_bytes=stored.size):",
        new="if said is not None:",
        tests=("tests/convert/test_copy.py::test_what_the_service_copies_is_not_believed",),
    ),
)

MUTANTS = (
    *_COMMIT,
    *_HOUSEKEEPING,
    *_FORMAT,
    *_UPLOAD,
    *_DOWNLOAD,
    *_DCP,
    *_SHARE,
    *_RANKS,
    *_TENSORS,
    *_STORES,
    *_MANAGER,
)
