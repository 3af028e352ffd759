"""What would settle a refusal, or change a verdict: one sentence a case.

Invariant: every code that can refuse a rollout or exclude a call has a remedy, and a remedy never suggests to
change what was sampled. Pure: codes and evidence in, text out.

Not here: what happened (prose).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from gristmill.errors import Code

__all__ = ["OTHERWISE_INCLUDED", "REFUSAL_REMEDIES", "VERDICT_REMEDIES", "refusal_remedies"]

REFUSAL_REMEDIES: Final[Mapping[Code, str]] = {
    Code.CALL_IDENTITY_REUSED: "Give every captured call an id of its own, and every choice of a reply its index.",
    Code.REFERENCES_PARTIAL: "Let every returned turn name its model calls, or none.",
    Code.REFERENCE_UNKNOWN: "Capture the call that the reference names, or drop the reference.",
    Code.REFERENCE_CONTRADICTORY: "Let each reference name exactly one captured call, and return one trajectory.",
    Code.REFERENCE_UNRETURNED: "Return the content of every referenced call, or reference only what is returned.",
    Code.SESSIONS_MIXED: "Return the envelopes of one session, all with its session_id or none with one.",
    Code.OUTPUT_MISSING: "Give the harness's result (--result FILE, or result.json beside the calls); where a "
    "harness returns nothing but a reward, use --policy final_context.",
    Code.OUTPUT_MALFORMED: "Correct the result at that place: it is not of the JSON type that its format has there.",
    Code.SNAPSHOT_ITEM_CONFLICT: "Return each item id with one content in all snapshots.",
    Code.SNAPSHOT_AMBIGUOUS: "Keep item ids in the snapshots, or return each item once.",
    Code.ENVELOPE_EMPTY: "Return what the model authored in that envelope, or leave the envelope out.",
    Code.ITEM_TYPE_UNSUPPORTED: "Nothing can be proved about this item type; run the tool in the harness, so that "
    "its call and its output are returned.",
    Code.ITEM_TOO_DEEP: "Return less deeply nested JSON in that item.",
    Code.ITEM_TOO_LARGE: "Return a smaller item.",
    Code.ITEM_IDENTITY_REUSED: "Serve every item with an id of its own.",
    Code.ATOMS_UNAVAILABLE: "Capture the content of the replies, or do without the options that need it.",
    Code.LINEAGE_BROKEN: "Capture the missing parent, or correct the recorded parent_call_id.",
    Code.LINEAGE_CONTRADICTION: "Return the items in the order in which they were authored, or correct the recorded "
    "parents.",
    Code.MATCH_MISSING: "Return what the captured calls served, unchanged and whole.",
    Code.MATCH_AMBIGUOUS: "Keep item ids in the returned history, reference the calls "
    "(trajectory.turns[*].model_calls), or name the scored response.",
    Code.MATCH_UNDECIDED: "Keep item ids in the returned history, or reference the calls: then nothing is searched.",
    Code.TERMINAL_NOT_SELECTED: "Return the scored reply in the history, or correct response.id.",
    Code.DECLARED_TERMINAL_NOT_SELECTED: "Return that reply in the history, or correct terminal_response_id.",
    Code.DECLARED_TERMINAL_CONFLICT: "Let terminal_response_id and response.id name the same call.",
    Code.TERMINAL_UNATTRIBUTED: "Return the scored response with its id, or name it in terminal_response_id.",
    Code.WITNESS_DISAGREEMENT: "Correct the result: its ids and its content name different calls.",
    Code.SELECTION_EMPTY: "Return a history that holds at least one captured reply.",
    Code.SELECTION_DUPLICATED: "Return each reply once; envelopes that repeat earlier ones are not a history.",
    Code.COMPLETION_UNKNOWN: "Record the status and finish reason that the engine gave for this call.",
    Code.SELECTED_CALL_FAILED: "Nothing settles this: the reply was not finished, and is not trained as if it were.",
    Code.CAPTURE_INCOMPLETE: "Supply the lost call, or record that the harness never received it "
    "(maybe_received: false).",
    Code.TOKENS_UNUSABLE: "Capture the call with complete token ids and log-probabilities; the evidence holds what "
    "is wrong with them.",
    Code.MEDIA_MISSING: "Record where each medium of the request stands in the prompt.",
    Code.MODELS_MIXED: "Say which model is trained: --train-model NAME.",
    Code.NOTHING_TO_TRAIN: "Nothing to do: no selected call of the trained model sampled a token.",
    Code.FAILURE_MASKED: "Nothing to do, or attribute the failure to the policy: then it is trained with its reward.",
    Code.CREDIT_INVALID: "Finish the rollout with credits of tokens that its calls sampled, each token at most once.",
    Code.REWARD_MISSING: "Finish the rollout with a reward.",
    Code.GROUP_MISSING: "Finish the rollout with a group_id, or ask for no advantage over groups.",
    Code.ADVANTAGE_REQUIRED: "Finish the rollout with an advantage, or compute one: --advantage group_mean.",
    Code.REWARDS_DIFFER: "Give the rollout one reward, or use a format that holds one for each call.",
    Code.ROW_TOO_LONG: "Ask for a longer shape, or let each call be a row of its own: --mode per_call.",
    Code.NOT_EXPRESSIBLE: "Use a format that holds it; the message names what has no place.",
    Code.POLICY_BROKE_CONTRACT: "Let the policy return unique records out of those it was given, unchanged, and the "
    "response id of one of them.",
    Code.POLICY_REFUSED: "Ask the policy's author: the message is the policy's own.",
}
"""What would settle a refused rollout."""

_DIFFERENCES: Final[Mapping[str, str]] = {
    "text_edited": "Return the text as it was served.",
    "whitespace_only": "Return the text as it was served, or tolerate white space around it: --set whitespace=trim.",
    "unicode_form": "Return the text with its own code points and line ends; something normalises it.",
    "arguments_changed": "Return the arguments as they were served; something rewrites them.",
    "call_id_changed": "Return tool-call ids as they were served, or tolerate consistent renaming: "
    "--set tool_call_ids=renamed.",
    "reasoning_missing": "Return the reasoning too, or tolerate histories without it: --set reasoning=optional.",
    "reasoning_changed": "Return the reasoning as it was served.",
    "call_incomplete": "Return everything that the call served.",
    "order_changed": "Return the items of a reply in the order in which they were served.",
    "identity_conflict": "Return each item id with the content that it was served with.",
    "not_captured": "Capture the call that authored it; an earlier, uncaptured conversation can be taken as context: "
    "--set unmatched=context.",
}

VERDICT_REMEDIES: Final[Mapping[Code, str]] = {
    Code.REFERENCE: "It would be left out if the returned trajectory did not reference it.",
    Code.RESPONSE_ID: "It would be left out if the result named another response, and its reply were not returned.",
    Code.ITEM_ID: "It would be left out if its items were not returned.",
    Code.CONTENT: "It would be left out if its reply were not in the returned history.",
    Code.LINEAGE: "Returned item ids, or references, could name another of the calls with this content.",
    Code.INTERCHANGEABLE: "A returned item id or response id of one of the others would select that one; the rows "
    "would be the same.",
    Code.CAPTURED: "It would be left out if it had not finished and nothing continued it, or under another policy.",
    Code.ANCESTOR_OF_TERMINAL: "It would be left out if the scored call did not continue it.",
    Code.NOT_RETURNED: "It would be included if the harness returned its reply, or under --policy all_captured.",
    Code.RETRY_SUPERSEDED: "It would be included if the harness returned its reply instead, or under "
    "--policy all_captured.",
    Code.UNFINISHED_LEAF: "It would be included if it had finished with a reply.",
    Code.UNUSABLE_TOKENS: "It could be trained if its token ids and log-probabilities were captured completely.",
    Code.FOREIGN_MODEL: "It would be trained if --train-model named its model.",
    Code.NOT_IN_FINAL_CONTEXT: "It would be included if the scored call continued it, or under --policy all_captured.",
    Code.LOST: "It could be judged if its outcome had been stored.",
    Code.POLICY_EXCLUDED: "It would be included if the policy returned it.",
    Code.ROLLOUT_REJECTED: "It can be judged once the refusal of the rollout is settled.",
}
"""What would change the verdict of a call."""


OTHERWISE_INCLUDED: Final = frozenset({Code.NOT_RETURNED, Code.RETRY_SUPERSEDED, Code.NOT_IN_FINAL_CONTEXT})
"""Exclusions that another result or policy would lift, if the call's tokens could be trained."""


def refusal_remedies(code: Code, evidence: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what would settle a refusal, the most particular remedy first."""
    remedies: list[str] = []
    nearest = evidence.get("nearest")
    if isinstance(nearest, Mapping):
        difference = cast(Mapping[str, Any], nearest).get("difference")
        if isinstance(difference, str) and difference in _DIFFERENCES:
            remedies.append(_DIFFERENCES[difference])
    if not remedies and code in REFUSAL_REMEDIES:
        remedies.append(REFUSAL_REMEDIES[code])
    return tuple(remedies)
