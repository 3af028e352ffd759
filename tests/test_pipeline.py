"""One rollout through select and reconstruct: what holds after any policy, verdicts, and the funnel."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gristmill.captures import read_lines
from gristmill.credit import AdvantageKind, Advantages, Facts, Groups, facts_of
from gristmill.errors import Code, PolicyError, ReconstructionError, SelectionError
from gristmill.pipeline import (
    Funnel,
    RebuiltRollout,
    funnel_of,
    outcome_verdicts,
    rebuild_rollout,
    run_rollout,
    select_rollout,
)
from gristmill.reconstruction import RowMode
from gristmill.records import Attribution, CallCredit, Capture, Failure, LostCall, Result
from gristmill.selection import Rejected, ReturnedHistory, Selection, select_captured_calls
from tests.corpus.telling import Story as _Story
from tests.corpus.telling import call, message, output, said, user

Json = dict[str, Any]


def capture(*calls: Json) -> Capture:
    lines = _Story("story", "", calls, {}, {}).files()["capture.jsonl"].encode().splitlines()
    [rollout] = read_lines(lines).rollouts.values()
    return rollout.capture


TWO = (call("c1", said("one")), call("c2", said("two"), parent="c1"))
RETURNED = Result(value=output(message("one"), user(), message("two")), reward=1.0)


def test_rows_come_out() -> None:
    # The main job: calls and a result in, rows with a reward out.
    outcome = run_rollout(capture(*TWO), RETURNED, select_captured_calls, advantage=0.5)
    assert isinstance(outcome, RebuiltRollout)
    [row] = outcome.rows
    assert (row.reward, row.advantage) == (1.0, 0.5)
    for mode, count in ((RowMode.PER_CALL, 2), (RowMode.TREE, 1)):
        other = run_rollout(capture(*TWO), RETURNED, select_captured_calls, mode=mode)
        assert isinstance(other, RebuiltRollout)
        assert (len(other.rows), other.mode) == (count, mode)


def test_a_missing_result_is_a_refusal() -> None:
    # A harness that crashed hands back nothing; the batch goes on.
    outcome = run_rollout(capture(*TWO), Result(), select_captured_calls)
    assert isinstance(outcome, Rejected)
    assert (outcome.code, outcome.rollout_id) == (Code.OUTPUT_MISSING, "story")
    assert [verdict.code for verdict in outcome.verdicts] == [Code.ROLLOUT_REJECTED] * 2


def test_a_masked_failure_is_not_trained() -> None:
    # A sandbox that died says nothing about the policy; the same failure scored is trained with its reward.
    for attribution in Attribution:
        result = msgspec.structs.replace(RETURNED, failure=Failure("sandbox gone", attribution))
        outcome = run_rollout(capture(*TWO), result, select_captured_calls)
        if attribution is Attribution.MASK:
            assert isinstance(outcome, Rejected)
            assert (outcome.code, outcome.evidence) == (Code.FAILURE_MASKED, {"reason": "sandbox gone"})
            assert [verdict.code for verdict in outcome.verdicts] == [Code.ROLLOUT_REJECTED] * 2
        else:
            assert isinstance(outcome, RebuiltRollout)
            assert [row.reward for row in outcome.rows] == [1.0]


def test_advantages_of_a_run_are_found_by_the_rollouts_group() -> None:
    # The second pass of an export: the number of a rollout, or its refusal; the batch goes on.
    result = msgspec.structs.replace(RETURNED, group_id="g")
    groups = Groups.of([facts_of("story", 0, result), Facts("other", 0, "g", 0.0)])
    for given, expected in ((groups.advantages(AdvantageKind.GROUP_MEAN), 0.5), (0.25, 0.25), (None, None)):
        outcome = run_rollout(capture(*TWO), result, select_captured_calls, advantage=given)
        assert isinstance(outcome, RebuiltRollout)
        assert [row.advantage for row in outcome.rows] == [expected]
    outcome = run_rollout(capture(*TWO), result, select_captured_calls, advantage=Advantages.given())
    assert isinstance(outcome, Rejected)
    assert (outcome.code, outcome.where) == (Code.ADVANTAGE_REQUIRED, "$.advantage")


def test_a_credit_of_no_call_refuses_its_rollout() -> None:
    # A reward for a call that is not there is somebody's mistake; the batch goes on.
    result = msgspec.structs.replace(RETURNED, credits=(CallCredit(model_call_id="c9", reward=1.0),))
    outcome = run_rollout(capture(*TWO), result, select_captured_calls)
    assert isinstance(outcome, Rejected)
    assert (outcome.code, outcome.where) == (Code.CALL_UNKNOWN, "$.credits[0].model_call_id")


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (lambda records, result: ([], None), Code.SELECTION_EMPTY),
        (lambda records, result: (records, None), Code.TERMINAL_UNATTRIBUTED),
        (lambda records, result: (records, "r"), Code.POLICY_BROKE_CONTRACT),
    ],
)
def test_what_a_policy_must_say(policy: Any, code: Code) -> None:
    # A policy without calls or terminal makes no rows for nobody's reward.
    outcome = select_rollout(capture(*TWO), RETURNED, policy)
    assert isinstance(outcome, Rejected)
    assert outcome.code is code
    assert outcome.options == {}


def test_a_bug_in_a_policy_is_not_data() -> None:
    # A policy that raises a KeyError on every rollout must stop the run, not reject ten thousand rollouts.
    def buggy(records: Any, result: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(PolicyError):
        run_rollout(capture(*TWO), RETURNED, buggy)


def test_options_are_kept_in_either_outcome() -> None:
    # A file of refusals must say under which options they came about.
    policy = ReturnedHistory(whitespace="trim")
    good = select_rollout(capture(*TWO), RETURNED, policy)
    bad = select_rollout(capture(*TWO), Result(value={}), policy)
    assert good.options == bad.options == {"whitespace": "trim"}


def test_retries_by_request_digest() -> None:
    # Requests tell that a call answers the same question, also where tokens are missing.
    ask = {"messages": [user("2+2")]}
    retry = call("x1", said("five"), request=ask, generation_token_ids=None, generation_log_probs=None)
    outcome = select_rollout(
        capture(retry, call("c1", said("four"), request=ask)),
        Result(value=output(message("four"))),
        select_captured_calls,
    )
    assert isinstance(outcome, Selection)
    first = outcome.verdicts[0]
    assert (first.code, first.evidence) == (Code.RETRY_SUPERSEDED, {"superseded_by": "c1"})


def test_other_instructions_are_another_request() -> None:
    # The same words under another system prompt are no retry.
    requests = [{"messages": [{"role": "system", "content": text}, user("2+2")]} for text in "ab"]
    calls = [call("x1", said("five"), request=requests[0]), call("c1", said("four"), request=requests[1])]
    outcome = select_rollout(capture(*calls), Result(value=output(message("four"))), select_captured_calls)
    assert outcome.verdicts[0].code is Code.NOT_RETURNED


def test_lost_calls() -> None:
    # A lost call stops a rollout exactly where it may belong to it.
    made = capture(*TWO)

    def with_lost(**fields: Any) -> Selection | Rejected:
        return select_rollout(
            msgspec.structs.replace(made, lost=(LostCall(model_call_id="l1", **fields),)),
            RETURNED,
            select_captured_calls,
        )

    good = with_lost(parent_call_id="c1")
    assert isinstance(good, Selection)
    assert good.lost == ("l1",)
    assert good.verdicts[-1].code is Code.LOST
    bad = with_lost(maybe_received=True)
    assert isinstance(bad, Rejected)
    assert (bad.code, bad.evidence["selected_call"]) == (Code.CAPTURE_INCOMPLETE, None)


@pytest.mark.parametrize("resolution", ["unresolved", "ambiguous"])
def test_a_lost_call_and_an_open_parent(resolution: str) -> None:
    # The parent that nobody could name may be the lost call.
    made = capture(call("c1", said("one"), parent_resolution=resolution))
    lost = msgspec.structs.replace(made, lost=(LostCall(model_call_id="l1"),))
    outcome = select_rollout(lost, Result(value=output(message("one"))), select_captured_calls)
    assert isinstance(outcome, Rejected)
    assert outcome.code is Code.CAPTURE_INCOMPLETE
    assert isinstance(select_rollout(made, Result(value=output(message("one"))), select_captured_calls), Selection)


def test_media_must_be_placed() -> None:
    # An image whose tokens nobody can find could be joined to another conversation.
    placed = call("c1", said("one"), request_media=["d"], media=[{"digest": "d", "offset": 0, "length": 1}])
    assert isinstance(
        run_rollout(capture(placed), Result(value=output(message("one"))), select_captured_calls), RebuiltRollout
    )
    outcome = run_rollout(
        capture({**placed, "request_media": ["d", "d"]}), Result(value=output(message("one"))), select_captured_calls
    )
    assert isinstance(outcome, Rejected)
    assert (outcome.code, outcome.evidence["missing"]) == (Code.MEDIA_MISSING, ["d"])


def test_train_model_keeps_the_terminal() -> None:
    # The scored call may be a judge's; the reward still belongs to the rollout.
    mixed = capture(TWO[0], {**TWO[1], "model": "judge"})
    outcome = select_rollout(mixed, RETURNED, select_captured_calls, train_model="policy")
    assert isinstance(outcome, Selection)
    assert (outcome.calls, outcome.terminal_call_id) == (("c1",), "c2")
    rows = rebuild_rollout(mixed, outcome, RETURNED)
    assert isinstance(rows, RebuiltRollout)


def test_a_failed_rebuild_is_a_refusal() -> None:
    # Tokens that went missing after selection reject the rollout, and every unusable call says why.
    made = capture(*TWO)
    selection = select_rollout(made, RETURNED, select_captured_calls)
    assert isinstance(selection, Selection)
    outcome = rebuild_rollout(msgspec.structs.replace(made, tokens={}), selection, RETURNED)
    assert isinstance(outcome, Rejected)
    assert outcome.code is Code.TOKENS_UNUSABLE
    bare = [{**told, "generation_log_probs": None} for told in TWO]
    outcome = run_rollout(capture(*bare), RETURNED, select_captured_calls)
    assert [verdict.code for verdict in outcome_verdicts(outcome)] == [Code.UNUSABLE_TOKENS] * 2


def test_funnel() -> None:
    # Captured tokens must add up to trained plus excluded ones, each with a code.
    made = capture(*TWO, call("x3", said("no"), parent="c2", samples=3), call("e4", said(""), parent="c2", samples=0))
    result = Result(value=output(message("one"), user(), message("two"), user(), message("")))
    outcome = run_rollout(made, result, select_captured_calls)
    funnel = funnel_of(made, outcome)
    assert (funnel.captured_calls, funnel.captured_tokens) == (4, 7)
    assert (funnel.selected_calls, funnel.trained_calls, funnel.trained_tokens) == (3, 2, 4)
    assert funnel.excluded == {"not_returned": (1, 3), "empty_generation": (1, 0)}
    rejected = funnel_of(made, run_rollout(made, Result(), select_captured_calls))
    assert rejected.excluded == {"rollout_rejected": (4, 7)}
    selected = select_rollout(made, result, select_captured_calls)
    assert funnel_of(made, selected).excluded == {"not_returned": (1, 3)}
    both = funnel.plus(rejected)
    assert both.captured_tokens == 14
    assert both.excluded == {"not_returned": (1, 3), "empty_generation": (1, 0), "rollout_rejected": (4, 7)}
    assert funnel.plus(Funnel()) == funnel


def test_funnel_counts_unusable_calls() -> None:
    # A capture whose engine gave no log-probs must show where its calls went.
    made = capture(TWO[0], {**TWO[1], "generation_log_probs": None})
    funnel = funnel_of(made, run_rollout(made, RETURNED, select_captured_calls))
    assert (funnel.captured_calls, funnel.usable_calls) == (2, 1)
    assert funnel.excluded == {"rollout_rejected": (1, 2), "unusable_tokens": (1, 0)}


def test_errors_of_both_halves_are_values() -> None:
    # One rollout's refusal never stops a batch, whichever half raised it.
    def refuses(error: type[SelectionError] | type[ReconstructionError]) -> Any:
        def policy(records: Any, result: Any) -> Any:
            raise error(Code.MATCH_MISSING, "no", evidence={"unusable_calls": "odd"})

        return policy

    for error in (SelectionError, ReconstructionError):
        outcome = run_rollout(capture(*TWO), RETURNED, refuses(error))
        assert isinstance(outcome, Rejected)
        assert outcome.code is Code.MATCH_MISSING
