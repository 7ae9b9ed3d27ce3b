"""Why a rollout is not trained: the one list of words that records, metrics, the archive and tables use.

Records carry the word as text, because the folder of an older version may hold a word that is not here.
"""

from enum import Flag, StrEnum, auto


class DropStage(Flag):
    """What is dropped."""

    ATTEMPT = auto()
    """One attempt in the actor. Its group is dropped, too, if too many of them fail."""
    GROUP = auto()
    """All rollouts of a problem."""
    SAMPLE = auto()
    """One rollout in the preprocessor."""

    def __str__(self) -> str:
        return ", ".join(str(stage.name).lower() for stage in self)


class DropReason(StrEnum):
    """A reason, as its word. docs/failures.md has the table.

    >>> DropReason.LAG.text
    'a token is older than `max_lag_steps`'
    """

    stage: DropStage
    text: str
    """What happened."""
    fix: str
    """What the user can do."""
    repeats: bool
    """The cause lies outside the problem: the actor tries the attempt again, `actor.max_group_reissues` times."""
    keeps_answers: bool
    """It mostly lies outside the attempt, too: tried again for the first time, it gets the answers that it had got.
    Later they are sampled anew, since they may be a faulty server's, or the very reason of the failure."""

    def __new__(
        cls, word: str, stage: DropStage, text: str, fix: str, repeats: bool = False, keeps_answers: bool = False
    ) -> "DropReason":
        member = str.__new__(cls, word)
        member._value_ = word
        member.stage, member.text, member.fix = stage, text, fix
        member.repeats, member.keeps_answers = repeats, keeps_answers
        return member

    TRANSPORT = (
        "transport",
        DropStage.ATTEMPT,
        "a server or service gave no answer, or an error that may pass",
        "read actor_llm_*/log.txt",
        True,
        True,
    )
    VERIFIER = (
        "verifier",
        DropStage.ATTEMPT,
        "the judge gave no verdict",
        "verifier_*/log.txt and actor_*/log.txt name the judge's error",
        True,
        True,
    )
    TIMEOUT = (
        "timeout",
        DropStage.ATTEMPT,
        "no result within `actor.rollout_timeout_s`",
        "raise it, or find what takes so long: answers, tools or the judge",
        True,
    )
    WEIGHTS = (
        "weights",
        DropStage.ATTEMPT,
        "a server missed its weight probe",
        "read actor_llm_*/log.txt and finetune_0/log.txt",
        True,
    )
    POISONOUS = (
        "poisonous",
        DropStage.ATTEMPT,
        "every worker that played it died",
        "actor_*/log.txt has the exit code: look for crashes of libraries and for memory",
        True,
    )
    DOMAIN_ERROR = (
        "domain_error",
        DropStage.ATTEMPT,
        "the domain's code failed",
        "event=rollout_failed in actor_*/log.txt has the exception and its line",
    )
    PROMPT_TOO_LONG = (
        "prompt_too_long",
        DropStage.ATTEMPT,
        "the server refused a prompt for its length",
        "raise max_model_len, or shorten the prompts",
    )
    TOO_LONG = (
        "too_long",
        DropStage.ATTEMPT | DropStage.SAMPLE,
        "a sequence is longer than `finetune.seq_length`",
        "raise it and max_model_len, or lower llm.parameters.max_tokens or the prompts' length",
    )
    NO_TRAINED_TOKENS = (
        "no_trained_tokens",
        DropStage.ATTEMPT | DropStage.SAMPLE,
        "the domain returned no sampled token to train on",
        "return the texts of its calls, with fewer labels of -100",
    )
    TOO_LARGE = (
        "too_large",
        DropStage.GROUP,
        "the group is larger than `streams.max_record_mb`",
        "raise it, or return fewer or shorter texts and images",
    )
    ZERO_ADVANTAGE = (
        "zero_advantage",
        DropStage.GROUP,
        "all rewards of the group are equal, and `preprocess.filter_zero_advantage_groups` is true",
        "nothing, unless most groups are: then choose easier or harder problems",
    )
    MALFORMED = (
        "malformed",
        DropStage.GROUP,
        "the record breaks a rule: a number is not finite, a named reward is missing, a first token is trained",
        "event=group_refused in preprocessor_*/log.txt names the rule",
    )
    NOT_SCORED = (
        "not_scored",
        DropStage.SAMPLE,
        "the reference model or a teacher refused it, or its log-probability is not finite",
        "event=sample_refused in preprocessor_*/log.txt has the server's words",
    )
    NO_HINT = (
        "no_hint",
        DropStage.SAMPLE,
        "the teacher sees hints, and a text of the rollout has no prompt with one",
        "return the texts of the LLM's calls instead of texts of your own",
    )
    FUTURE_VERSION = (
        "future_version",
        DropStage.SAMPLE,
        "a newer version sampled a token than the trainer has made: it went back to a checkpoint",
        "nothing: such rollouts are few and come after a restart",
    )
    LAG = (
        "lag",
        DropStage.SAMPLE,
        "a token is older than `max_lag_steps`",
        "raise it, start fewer rollouts at once, or set preprocess.lag_drop: token",
    )

    @classmethod
    def of(cls, word: str) -> "DropReason | None":
        """The reason of a word in a record. None: an older version wrote it."""
        return next((reason for reason in cls if reason == word), None)
