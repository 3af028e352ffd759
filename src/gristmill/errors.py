"""The error tree, and the closed set of codes that every refusal, verdict and error carries.

Invariant: a rollout that cannot be trained is data (`Refusal`, turned into a `Rejected` value by the pipeline);
a broken program or environment raises a child of `GristmillError`. Nothing here formats for a terminal.

    ValueError
      Refusal                 a rollout that cannot be selected or rebuilt: code, where, evidence
        SelectionError        raised by selection policies
        ReconstructionError   raised while rows are rebuilt
    GristmillError
      ConfigError             an option, a policy name or a setting is wrong
      CaptureError            the gateway or an engine adapter cannot capture
      DecodeError             bytes that are not what they claim to be
      LedgerError             the store of captured calls
      PolicyError             a policy cannot be found or loaded, or broke its contract
      ExportError             rows cannot be written in the asked format
      InternalError           an invariant of ours does not hold
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = [
    "CODE_MEANINGS",
    "CaptureError",
    "Code",
    "ConfigError",
    "DecodeError",
    "ExportError",
    "GristmillError",
    "InternalError",
    "LedgerError",
    "PolicyError",
    "ReconstructionError",
    "Refusal",
    "SelectionError",
]


class Code(StrEnum):
    """Every code Gristmill can print; `CODE_MEANINGS` documents each one."""

    # Selection refuses the rollout.
    CALL_IDENTITY_REUSED = "call_identity_reused"
    REFERENCES_PARTIAL = "references_partial"
    REFERENCE_UNKNOWN = "reference_unknown"
    REFERENCE_CONTRADICTORY = "reference_contradictory"
    REFERENCE_UNRETURNED = "reference_unreturned"
    SESSIONS_MIXED = "sessions_mixed"
    OUTPUT_MISSING = "output_missing"
    OUTPUT_MALFORMED = "output_malformed"
    SNAPSHOT_ITEM_CONFLICT = "snapshot_item_conflict"
    SNAPSHOT_AMBIGUOUS = "snapshot_ambiguous"
    ENVELOPE_EMPTY = "envelope_empty"
    ITEM_TYPE_UNSUPPORTED = "item_type_unsupported"
    ITEM_TOO_DEEP = "item_too_deep"
    ITEM_TOO_LARGE = "item_too_large"
    ITEM_IDENTITY_REUSED = "item_identity_reused"
    ATOMS_UNAVAILABLE = "atoms_unavailable"
    LINEAGE_BROKEN = "lineage_broken"
    LINEAGE_CONTRADICTION = "lineage_contradiction"
    MATCH_MISSING = "match_missing"
    MATCH_AMBIGUOUS = "match_ambiguous"
    MATCH_UNDECIDED = "match_undecided"
    TERMINAL_NOT_SELECTED = "terminal_not_selected"
    DECLARED_TERMINAL_NOT_SELECTED = "declared_terminal_not_selected"
    DECLARED_TERMINAL_CONFLICT = "declared_terminal_conflict"
    TERMINAL_UNATTRIBUTED = "terminal_unattributed"
    WITNESS_DISAGREEMENT = "witness_disagreement"
    SELECTION_EMPTY = "selection_empty"
    SELECTION_DUPLICATED = "selection_duplicated"
    # The pipeline refuses what a policy selected.
    COMPLETION_UNKNOWN = "completion_unknown"
    SELECTED_CALL_FAILED = "selected_call_failed"
    CAPTURE_INCOMPLETE = "capture_incomplete"
    TOKENS_UNUSABLE = "tokens_unusable"
    MEDIA_MISSING = "media_missing"
    MODELS_MIXED = "models_mixed"
    NOTHING_TO_TRAIN = "nothing_to_train"
    # Policies.
    POLICY_UNKNOWN = "policy_unknown"
    POLICY_LOAD_FAILED = "policy_load_failed"
    POLICY_NOT_CALLABLE = "policy_not_callable"
    POLICY_BROKE_CONTRACT = "policy_broke_contract"
    POLICY_OPTION_INVALID = "policy_option_invalid"
    POLICY_REFUSED = "policy_refused"
    # Verdicts: why one call was included.
    REFERENCE = "reference"
    RESPONSE_ID = "response_id"
    ITEM_ID = "item_id"
    CONTENT = "content"
    LINEAGE = "lineage"
    INTERCHANGEABLE = "interchangeable"
    CAPTURED = "captured"
    ANCESTOR_OF_TERMINAL = "ancestor_of_terminal"
    # Verdicts: why one call was excluded.
    NOT_RETURNED = "not_returned"
    RETRY_SUPERSEDED = "retry_superseded"
    UNFINISHED_LEAF = "unfinished_leaf"
    UNUSABLE_TOKENS = "unusable_tokens"
    FOREIGN_MODEL = "foreign_model"
    NOT_IN_FINAL_CONTEXT = "not_in_final_context"
    LOST = "lost"
    POLICY_EXCLUDED = "policy_excluded"
    ROLLOUT_REJECTED = "rollout_rejected"
    # Tokens: why the tokens of a call may not be trained.
    TOKEN_IDS_MISSING = "token_ids_missing"
    TOKEN_ID_INVALID = "token_id_invalid"
    TOKEN_COUNT_MISMATCH = "token_count_mismatch"
    PROMPT_IDS_MISSING = "prompt_ids_missing"
    PROMPT_IDS_DIFFER = "prompt_ids_differ"
    LOGPROBS_MISSING = "logprobs_missing"
    LOGPROB_COUNT_MISMATCH = "logprob_count_mismatch"
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    STREAM_TRUNCATED = "stream_truncated"
    ABORTED = "aborted"
    CALL_FAILED = "call_failed"
    REPLY_MALFORMED = "reply_malformed"
    EMPTY_GENERATION = "empty_generation"
    # A rollout has no place in a group, or in the format of a trainer.
    FAILURE_MASKED = "failure_masked"
    CREDIT_INVALID = "credit_invalid"
    REWARD_MISSING = "reward_missing"
    GROUP_MISSING = "group_missing"
    ADVANTAGE_REQUIRED = "advantage_required"
    REWARDS_DIFFER = "rewards_differ"
    ROW_TOO_LONG = "row_too_long"
    NOT_EXPRESSIBLE = "not_expressible"
    # Checks of `verify` over finished rows.
    ROW_MALFORMED = "row_malformed"
    ROW_SPANS_INVALID = "row_spans_invalid"
    ROW_TOKENS_DIFFER = "row_tokens_differ"
    ROW_MASK_DIFFERS = "row_mask_differs"
    ROW_LOGPROBS_DIFFER = "row_logprobs_differ"
    ROW_LINEAGE_DIFFERS = "row_lineage_differs"
    ROW_ID_DIFFERS = "row_id_differs"
    ROW_METADATA_DIFFERS = "row_metadata_differs"
    ROW_MISSING = "row_missing"
    ROW_UNEXPECTED = "row_unexpected"
    TOKEN_NOT_ONCE = "token_not_once"
    TOKENS_NOT_CONSERVED = "tokens_not_conserved"
    MANIFEST_DIFFERS = "manifest_differs"
    # The ledger.
    LEDGER_LOCKED = "ledger_locked"
    LEDGER_FOREIGN = "ledger_foreign"
    LEDGER_READ_ONLY = "ledger_read_only"
    LEDGER_NETWORK_FILE_SYSTEM = "ledger_network_file_system"
    LEDGER_FULL = "ledger_full"
    LEDGER_WRITE_FAILED = "ledger_write_failed"
    LEDGER_DAMAGED = "ledger_damaged"
    LEDGER_BUSY = "ledger_busy"
    LEDGER_CLOSED = "ledger_closed"
    LEDGER_UNREACHABLE = "ledger_unreachable"
    LEASE_EXPIRED = "lease_expired"
    ATTEMPT_ELSEWHERE = "attempt_elsewhere"
    ATTEMPT_CLOSED = "attempt_closed"
    ATTEMPT_DIFFERS = "attempt_differs"
    KEY_EXISTS = "key_exists"
    # The gateway refuses a request, or a call fails in it.
    KEY_MISSING = "key_missing"
    KEY_UNKNOWN = "key_unknown"
    KEY_FORBIDDEN = "key_forbidden"
    HOST_REFUSED = "host_refused"
    ROUTE_UNKNOWN = "route_unknown"
    BODY_TOO_LARGE = "body_too_large"
    REQUEST_MALFORMED = "request_malformed"
    PARAMETER_REFUSED = "parameter_refused"
    MODEL_UNKNOWN = "model_unknown"
    GATEWAY_BUSY = "gateway_busy"
    DISK_LOW = "disk_low"
    NOT_DURABLE = "not_durable"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_LOST = "engine_lost"
    ENGINE_UNFIT = "engine_unfit"
    CLIENT_GONE = "client_gone"
    # Files, options, environment.
    FILE_UNREADABLE = "file_unreadable"
    FILE_MALFORMED = "file_malformed"
    SCHEMA_UNSUPPORTED = "schema_unsupported"
    OPTION_INVALID = "option_invalid"
    ROLLOUT_UNKNOWN = "rollout_unknown"
    CALL_UNKNOWN = "call_unknown"
    OUTPUT_EXISTS = "output_exists"
    CASE_FAILED = "case_failed"
    TRAINER_MISSING = "trainer_missing"
    WORKER_LOST = "worker_lost"
    MEMORY_EXHAUSTED = "memory_exhausted"
    USAGE = "usage"
    INTERRUPTED = "interrupted"
    INTERNAL = "internal"


CODE_MEANINGS: Mapping[Code, str] = {
    Code.CALL_IDENTITY_REUSED: "Two captured calls share a model_call_id, or a (response_id, choice_index) pair.",
    Code.REFERENCES_PARTIAL: "Some turns of the returned trajectory name their model calls and others do not.",
    Code.REFERENCE_UNKNOWN: "A reference names a response or call that was not captured.",
    Code.REFERENCE_CONTRADICTORY: "A reference has no key, its keys name different calls, or two trajectories differ.",
    Code.REFERENCE_UNRETURNED: "References name calls that the returned content does not contain.",
    Code.SESSIONS_MIXED: "The returned envelopes carry more than one session id (absence counts as a value).",
    Code.OUTPUT_MISSING: "An envelope has no list under `output`, or the result holds no history at all.",
    Code.OUTPUT_MALFORMED: "Something in the result is not of the JSON type expected at that path.",
    Code.SNAPSHOT_ITEM_CONFLICT: "Two snapshots hold the same item id with different content.",
    Code.SNAPSHOT_AMBIGUOUS: "Repeated and skipped snapshot items give two different sets of calls.",
    Code.ENVELOPE_EMPTY: "An envelope names a captured call but holds nothing that a model authored.",
    Code.ITEM_TYPE_UNSUPPORTED: "An item type is neither a supported generated type nor a known environment type.",
    Code.ITEM_TOO_DEEP: "JSON inside one item is nested deeper than the limit.",
    Code.ITEM_TOO_LARGE: "One item is larger than the limit.",
    Code.ITEM_IDENTITY_REUSED: "A returned item id was served by several captured calls.",
    Code.ATOMS_UNAVAILABLE: "A policy option needs the canonical atoms of records that carry only fingerprints.",
    Code.LINEAGE_BROKEN: "A proven call has a recorded parent that is missing, or its ancestors form a cycle.",
    Code.LINEAGE_CONTRADICTION: "Every reading of the history puts a call after one that descends from it.",
    Code.MATCH_MISSING: "A returned item cannot be explained by the captured calls.",
    Code.MATCH_AMBIGUOUS: "The history has readings that select different calls, and no evidence decides.",
    Code.MATCH_UNDECIDED: "The search for readings spent its budget before it could prove one answer.",
    Code.TERMINAL_NOT_SELECTED: "No reading of the history contains the scored call.",
    Code.DECLARED_TERMINAL_NOT_SELECTED: "No reading contains the call declared by terminal_response_id.",
    Code.DECLARED_TERMINAL_CONFLICT: "terminal_response_id and response.id name different calls.",
    Code.TERMINAL_UNATTRIBUTED: "No evidence names one scored call.",
    Code.WITNESS_DISAGREEMENT: "Two witnesses name different calls as the scored one.",
    Code.SELECTION_EMPTY: "Nothing was selected.",
    Code.SELECTION_DUPLICATED: "The history, or the reference list, holds the same call more than once.",
    Code.COMPLETION_UNKNOWN: "A selected call has no usable completion status, or is incomplete without a reason.",
    Code.SELECTED_CALL_FAILED: "A selected call failed, was aborted, or stopped for a reason other than length.",
    Code.CAPTURE_INCOMPLETE: "A call that was admitted and lost may belong to the selected history.",
    Code.TOKENS_UNUSABLE: "A selected call has no trainable tokens; the evidence holds its own reason.",
    Code.MEDIA_MISSING: "A selected call's request carried media that its record does not place.",
    Code.MODELS_MIXED: "The selected calls come from several models and `train_model` was not given.",
    Code.NOTHING_TO_TRAIN: "Every selected call has an empty generation.",
    Code.POLICY_UNKNOWN: "No built-in selection policy has this name.",
    Code.POLICY_LOAD_FAILED: "The module or attribute of a `package.module:function` policy cannot be loaded.",
    Code.POLICY_NOT_CALLABLE: "The named object is not a selection policy: it cannot be called.",
    Code.POLICY_BROKE_CONTRACT: "A policy returned something other than unique, unchanged captured records.",
    Code.POLICY_OPTION_INVALID: "A policy does not have this option, or the option does not take this value.",
    Code.POLICY_REFUSED: "A custom policy refused the rollout with a plain ValueError; the message is its own.",
    Code.REFERENCE: "Included: the returned trajectory references this call.",
    Code.RESPONSE_ID: "Included: a returned response id names this call.",
    Code.ITEM_ID: "Included: a returned item id was served by this call alone.",
    Code.CONTENT: "Included: its content is in the history and no other captured call can stand there.",
    Code.LINEAGE: "Included: of several calls with this content, it is an ancestor of a proven call.",
    Code.INTERCHANGEABLE: "Included: stands for calls whose tokens, log-probabilities and evidence are equal.",
    Code.CAPTURED: "Included: the policy keeps captured calls.",
    Code.ANCESTOR_OF_TERMINAL: "Included: the scored call, or a resolved ancestor of it.",
    Code.NOT_RETURNED: "Excluded: the returned history does not contain it.",
    Code.RETRY_SUPERSEDED: "Excluded: an included call answers the same request of the same parent.",
    Code.UNFINISHED_LEAF: "Excluded: it did not finish, and nothing continues it.",
    Code.UNUSABLE_TOKENS: "Excluded: its tokens may not be trained; the evidence holds the reason.",
    Code.FOREIGN_MODEL: "Excluded: sampled by a model other than the trained one; it stays context.",
    Code.NOT_IN_FINAL_CONTEXT: "Excluded: not in the context of the scored reply.",
    Code.LOST: "Excluded: the call was admitted and no outcome was ever stored.",
    Code.POLICY_EXCLUDED: "Excluded: the custom policy did not return it.",
    Code.ROLLOUT_REJECTED: "Excluded: the whole rollout was refused; the evidence holds the code.",
    Code.TOKEN_IDS_MISSING: "The engine's reply holds no complete list of sampled token ids.",
    Code.TOKEN_ID_INVALID: "A token id is negative, not an integer, or outside 32 bits.",
    Code.TOKEN_COUNT_MISMATCH: "The number of sampled ids, or of the prompt's, differs from the usage reported.",
    Code.PROMPT_IDS_MISSING: "The engine's reply holds no prompt token ids.",
    Code.PROMPT_IDS_DIFFER: "The engine was given its prompt as token ids, and its reply names other ones.",
    Code.LOGPROBS_MISSING: "The engine's reply holds no log-probabilities.",
    Code.LOGPROB_COUNT_MISMATCH: "The number of log-probabilities differs from the number of sampled ids.",
    Code.LOGPROB_NOT_FINITE: "A log-probability is not a finite number.",
    Code.STREAM_TRUNCATED: "The event stream ended before the protocol's terminal event.",
    Code.ABORTED: "The generation was aborted.",
    Code.CALL_FAILED: "The engine answered with an error.",
    Code.REPLY_MALFORMED: "The engine's reply cannot be read as its dialect.",
    Code.EMPTY_GENERATION: "The call sampled no token; it makes no row and is reported.",
    Code.FAILURE_MASKED: "The rollout failed for a reason that says nothing about the policy, and is not trained.",
    Code.CREDIT_INVALID: "A credit names no sampled tokens of its call, overlaps another, or is no finite number.",
    Code.REWARD_MISSING: "The rollout has no reward, and what was asked for needs one; a missing reward is not 0.",
    Code.GROUP_MISSING: "The rollout names no group, and an advantage over a group was asked for.",
    Code.ADVANTAGE_REQUIRED: "The format needs an advantage, the rollout has none, and none was to be computed.",
    Code.REWARDS_DIFFER: "The format holds one reward a rollout, and its rows have several.",
    Code.ROW_TOO_LONG: "A row is longer than the shape that was asked for; rows are never cut.",
    Code.NOT_EXPRESSIBLE: "The trainer's format has no place for something that a row would be wrong without.",
    Code.ROW_MALFORMED: "A row's arrays have the wrong type, shape, length or value range.",
    Code.ROW_SPANS_INVALID: "A row's spans do not tile it, or name the wrong calls.",
    Code.ROW_TOKENS_DIFFER: "A row's tokens are not the captured ones.",
    Code.ROW_MASK_DIFFERS: "A row trains a token that was not sampled, or masks one that it owns.",
    Code.ROW_LOGPROBS_DIFFER: "A row's log-probabilities are not the captured ones.",
    Code.ROW_LINEAGE_DIFFERS: "A row, certificate or record names another parent than the evidence proves.",
    Code.ROW_ID_DIFFERS: "A row's id is not the digest of its content.",
    Code.ROW_METADATA_DIFFERS: "A row's reward, group, weight or other metadata differs from the rollout's.",
    Code.ROW_MISSING: "A row that the capture proves is not in the file.",
    Code.ROW_UNEXPECTED: "A row is in the file that the capture does not prove.",
    Code.TOKEN_NOT_ONCE: "A sampled token is trained in no row, or in several.",
    Code.TOKENS_NOT_CONSERVED: "Sampled tokens do not add up to trained plus excluded ones.",
    Code.MANIFEST_DIFFERS: "A file is not what its manifest says.",
    Code.LEDGER_LOCKED: "Another process writes to this ledger.",
    Code.LEDGER_FOREIGN: "The file is no ledger of gristmill.",
    Code.LEDGER_READ_ONLY: "The ledger's file or folder cannot be written to.",
    Code.LEDGER_NETWORK_FILE_SYSTEM: "The ledger is on a network file system, where SQLite cannot keep it safe.",
    Code.LEDGER_FULL: "The disk that holds the ledger is full; what was acknowledged is there.",
    Code.LEDGER_WRITE_FAILED: "The operating system could not write the ledger; what was acknowledged is there.",
    Code.LEDGER_DAMAGED: "The ledger's file is damaged: what it holds is not what was written.",
    Code.LEDGER_BUSY: "More writes are waiting for the ledger than it takes; try again later.",
    Code.LEDGER_CLOSED: "The ledger was closed, or belongs to another process.",
    Code.LEDGER_UNREACHABLE: "The database of the ledger cannot be reached or refuses the connection; what was "
    "acknowledged is there.",
    Code.LEASE_EXPIRED: "The process was silent for longer than its lease of the ledger, so the write was refused; it "
    "goes on under a new lease, and its calls in flight are lost.",
    Code.ATTEMPT_ELSEWHERE: "The attempt belongs to another gateway that writes to the same ledger.",
    Code.ATTEMPT_CLOSED: "The attempt has finished or is frozen and does not take this any more.",
    Code.KEY_EXISTS: "Another attempt, or this one with other settings, has this rollout key or name already.",
    Code.KEY_MISSING: "The request carries no key; the gateway serves nobody without one.",
    Code.KEY_UNKNOWN: "The key is none of this gateway's, or was revoked.",
    Code.KEY_FORBIDDEN: "The key does not permit this: another rollout's address, or an act of the administrator.",
    Code.HOST_REFUSED: "The request comes from a browser page, or names a host that the gateway does not answer to.",
    Code.ROUTE_UNKNOWN: "The gateway serves no such route, and forwards nothing that it does not know.",
    Code.BODY_TOO_LARGE: "The request body is larger than the setting that the message names.",
    Code.REQUEST_MALFORMED: "The request body is not what its dialect says.",
    Code.PARAMETER_REFUSED: "The request sets a parameter that a harness may not set, or that cannot be carried over.",
    Code.MODEL_UNKNOWN: "No configured model has this name.",
    Code.GATEWAY_BUSY: "More calls are in flight than the setting allows; try again later.",
    Code.DISK_LOW: "The ledger's disk has less free space than the setting asks for; no call is admitted.",
    Code.NOT_DURABLE: "The call could not be made durable, so its reply was withheld.",
    Code.ENGINE_UNREACHABLE: "No engine could be connected to, or it dropped the connection before it answered.",
    Code.ENGINE_LOST: "The engine was silent for too long and its health check failed, or its answer broke off.",
    Code.ENGINE_UNFIT: "The engine does not return what training capture needs.",
    Code.CLIENT_GONE: "The client closed its connection before the reply was complete.",
    Code.ATTEMPT_DIFFERS: "The ledger holds this attempt, or its result, with other content.",
    Code.FILE_UNREADABLE: "A file cannot be read or written.",
    Code.FILE_MALFORMED: "A file does not hold what its format demands.",
    Code.SCHEMA_UNSUPPORTED: "A file was written by a newer version of Gristmill.",
    Code.OPTION_INVALID: "An option or argument has a value that it does not take.",
    Code.ROLLOUT_UNKNOWN: "No rollout with this id is in the capture.",
    Code.CALL_UNKNOWN: "No call with this id is in the rollout.",
    Code.OUTPUT_EXISTS: "The output is already there, and overwriting was not asked for.",
    Code.CASE_FAILED: "A conformance case did not have the expected outcome.",
    Code.TRAINER_MISSING: "The trainer's package, whose objects were asked for, is not installed.",
    Code.WORKER_LOST: "A process of a build ended before its partition was there; finished partitions stay.",
    Code.MEMORY_EXHAUSTED: "The process asked for memory that the machine, or its limit, does not have.",
    Code.USAGE: "The command line is wrong.",
    Code.INTERRUPTED: "The command was interrupted.",
    Code.INTERNAL: "An invariant of Gristmill does not hold: a bug, please report it.",
}
"""One sentence per code; the reference page and `explain` are rendered from it."""


class Refusal(ValueError):
    """A rollout that cannot be trained, as an exception inside the core.

    Args:
        code: why.
        message: one sentence: what was expected and what was found.
        where: the place, a JSON path (`$.responses[1].output[3]`) or `call=ID`.
        evidence: JSON-able facts that prove the refusal.
    """

    def __init__(
        self, code: Code, message: str, *, where: str = "$", evidence: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.evidence: dict[str, Any] = dict(evidence or {})

    def __str__(self) -> str:
        return f"{self.code}: {self.message} (at {self.where})"


class SelectionError(Refusal):
    """Raised by a selection policy to refuse a rollout."""


class ReconstructionError(Refusal):
    """Raised when the selected calls cannot be rebuilt into rows."""


class GristmillError(Exception):
    """A broken program or environment.

    Args:
        message: one sentence: what, where, expected, got.
        code: from the closed set.
        where: file, line, option or path concerned.
        hint: what to do about it.
    """

    default_code = Code.INTERNAL

    def __init__(
        self, message: str, *, code: Code | None = None, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.where = where
        self.hint = hint
        if hint is not None:
            # From Python, where nobody prints hints, the traceback does.
            self.add_note(f"hint: {hint}")


class ConfigError(GristmillError):
    """An option, a name or a setting is wrong."""

    default_code = Code.OPTION_INVALID


class CaptureError(GristmillError):
    """A call cannot be captured."""

    default_code = Code.REPLY_MALFORMED


class DecodeError(GristmillError):
    """Bytes are not what they claim to be."""

    default_code = Code.FILE_MALFORMED


class LedgerError(GristmillError):
    """The store of captured calls cannot do what was asked."""

    default_code = Code.FILE_UNREADABLE


class PolicyError(GristmillError):
    """A selection policy cannot be found or loaded."""

    default_code = Code.POLICY_UNKNOWN


class ExportError(GristmillError):
    """Rows cannot be written in the asked format."""

    default_code = Code.FILE_UNREADABLE


class InternalError(GristmillError):
    """An invariant of ours does not hold."""

    default_code = Code.INTERNAL
