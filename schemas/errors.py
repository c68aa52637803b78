"""Every error that Arriero raises or records.

    ArrieroError                      code, retriable
    ├── BadJob                        a job that no attempt can mend; refused at the door where it enters
    │   └── UnknownVersion            written for a later release: dead-lettered, replayable after an upgrade
    ├── Undecodable                   a record in which no valid job id can be read
    ├── LogError                      the job log
    │   ├── LogUnavailable            brokers or files out of reach; try again (retriable)
    │   ├── Fenced                    another worker owns the claim now; drop what it covered
    │   ├── Revoked                   the claim was given back or taken by a rebalance
    │   ├── RecordTooLarge            the log refuses a record of this size
    │   ├── Unreadable                an event or a ledger that this release cannot read, and must not pass over
    │   └── TopicFault                topics missing or set so that a guarantee breaks
    ├── BusUnavailable                the token bus is out of reach; tokens wait (retriable)
    ├── EngineError                   the engine failed one sequence or step (retriable)
    │   └── ModelError                a model file that cannot be used
    ├── JobNotFound                   nobody knows this job id, or its results have expired
    ├── ConflictingDuplicate          this id belongs to a job that asked for something else
    ├── NoLiveWorker                  no worker is alive for this pool; the job stays queued (retriable)
    └── SetupError                    settings, folders, ports: the operator must act

`code` is stable: clients branch on it, dashboards count by it, and it never changes its meaning.
`retriable` says whether the same work may succeed later, so that retry code never lists types.
`str(error)` is one sentence that says what is wrong and, where it can, what to do.
"""

from __future__ import annotations

from typing import ClassVar

ERROR_TEXT_CHARS = 2_000
"""Longest error text in a record. A traceback or an echoed prompt must not make an event too large."""


class ArrieroError(Exception):
    """The root of the tree. `code` may be narrowed for one instance, `retriable` never is."""

    code: str = "error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message[:ERROR_TEXT_CHARS])
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self)


class BadJob(ArrieroError):
    """A job that breaks the contract. Codes:

    malformed_json, invalid_utf8, null_value, job_too_large, bad_id, unknown_field, missing_field, bad_type,
    bad_value, not_finite, unsupported_option, empty_prompt, class_mismatch, unknown_model, prompt_too_long,
    bad_template, bad_grammar.
    """

    code = "bad_value"

    def __init__(
        self, message: str, *, code: str | None = None, field: str | None = None, job_id: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.field = field
        self.job_id = job_id


class UnknownVersion(BadJob):
    code = "unknown_version"


class Undecodable(ArrieroError):
    """No valid job id can be read from a record. Its code is that of the `BadJob` that stood in the way."""

    code = "undecodable"


class LogError(ArrieroError):
    code = "log_error"


class LogUnavailable(LogError):
    code = "log_unavailable"
    retriable = True


class Fenced(LogError):
    code = "fenced"


class Revoked(LogError):
    code = "revoked"


class RecordTooLarge(LogError):
    code = "record_too_large"


class Unreadable(LogError):
    """Codes: unknown_version for what a later release has written, unreadable for what none has."""

    code = "unreadable"


class TopicFault(LogError):
    """Topics that are missing or misconfigured. The message carries the command that mends them."""

    code = "topic_fault"


class BusUnavailable(ArrieroError):
    code = "bus_unavailable"
    retriable = True


class EngineError(ArrieroError):
    code = "engine_error"
    retriable = True


class ModelError(EngineError):
    """Codes: model_missing, model_invalid, model_unsupported, model_too_large, model_digest."""

    code = "model_invalid"
    retriable = False


class JobNotFound(ArrieroError):
    code = "job_not_found"


class ConflictingDuplicate(ArrieroError):
    code = "duplicate_conflict"


class NoLiveWorker(ArrieroError):
    code = "no_live_worker"
    retriable = True


class SetupError(ArrieroError):
    """Codes: bad_setting, data_folder_busy, data_folder_unwritable, port_in_use, missing_extra, ..."""

    code = "setup_error"
