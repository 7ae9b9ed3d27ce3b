"""Names of the topics and who writes and reads them.

| topic           | writer       | record                 | readers                      |
|-----------------|--------------|------------------------|------------------------------|
| `actor`         | actor        | `ActorRecord`          | preprocessor, ledger         |
| `actor_test`    | actor        | `RolloutGroup`         | people                       |
| `training_data` | preprocessor | `MicroBatch`           | finetune rank = partition    |
| `preprocessor`  | preprocessor | `PreprocessorProgress` | actor (pacing), ledger       |
| `trainer`       | finetune     | `TrainerMessage`       | actor, preprocessor, launcher|
| `evaluation`    | actor        | `EvaluationMessage`    | finetune, launcher           |
"""

ACTOR = "actor"
ACTOR_TEST = "actor_test"
TRAINING_DATA = "training_data"
PREPROCESSOR = "preprocessor"
TRAINER = "trainer"
EVALUATION = "evaluation"

RETAINED_MB = {TRAINER: 64, PREPROCESSOR: 256, ACTOR_TEST: 512}
"""Topics that nobody reads to its end, and how much of each is kept at least. The others are deleted as their readers
commit; `evaluation` is a line per evaluation."""
