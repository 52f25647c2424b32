"""The commands: their arguments and what each does, a line each."""

VERBS = {
    "recipes": ("", "lists the recipes, a line each"),
    "config": ("RECIPE [--flags]", "prints the resolved configuration as YAML"),
    "generate": ("OUT --rows N", "writes a synthetic click log with a planted truth, and truth.json beside it"),
    "vocabulary": ("PATH --out DIR", "one pass over a click log -> the Preprocessor (schema, constants, vocabularies)"),
    "preprocess": (
        "PATH --out DIR --format F",
        "writes a log as parquet, npy or binary, preprocessed; text as mds",
    ),
    "adopt": (
        "FOLDER [--out DIR]",
        "makes TorchRec's arrays, or MDS shards of tokens, trainable as they are: checks them, copies nothing",
    ),
    "split": (
        "PATH --out DIR --by KIND",
        "writes training, validation and test files of a log: random rows or groups, by time, last per user",
    ),
    "validate": ("PATH", "reports on a log: faults, missing values, categories, drift; exit 2 where a gate fails"),
    "fetch": ("NAME --out DIR", "downloads a published data set, resuming and checking each file"),
    "plan": (
        "RECIPE [--cluster cpus=N,..]",
        "how a recipe's tables are spread over workers, and their memory; rows/s and bottleneck there",
    ),
    "train": ("RECIPE [--flags] [-v|-q]", "trains; the same storage and name again resumes where the run stopped"),
    "tune": (
        "RECIPE --search FILE.yaml",
        "tries settings of a recipe on one reading of the log; tells the best and how sure",
    ),
    "supervise": ("-- train RECIPE [--flags]", "trains as a job of a cluster, and goes on when its head was lost"),
    "evaluate": ("CHECKPOINT PATH", "scores every labelled row exactly once -> metrics as JSON"),
    "compare": (
        "CHECKPOINT... PATH",
        "several click models on the same rows: metrics, costs, which differ; exit 2 where a gate fails",
    ),
    "ensemble": ("CHECKPOINT... --out DIR", "makes several click models one, whose logit is the mean of theirs"),
    "predict": ("CHECKPOINT PATH --out DIR", "writes predictions as Parquet, in input order, with the row's number"),
    "export": ("CHECKPOINT --out DIR", "writes a trained model as other tools read it"),
    "serve": ("CHECKPOINT_OR_EXPORT [--port P]", "scores rows over HTTP, on Ray Serve"),
    "top": (
        "RUN [--once]",
        "shows a run in progress in the terminal: figures, where the time goes, what holds it back",
    ),
    "report": (
        "RUN [RUN ...]",
        "writes what a run's events tell as one HTML file: metrics, curves, times, failures; or several",
    ),
    "profile": ("RUN [--steps N]", "records steps of a run in progress with torch.profiler, into RUN/profile"),
    "benchmark": ("NAME", "measures, as ratios against a peer or a ceiling in the same run"),
    "doctor": ("[--json]", "what is installed, what fits together, what does not and how to fix it"),
}

STATUSES = {
    0: "done",
    1: "any other error, with a traceback if it is unexpected",
    2: "the user can fix it: one line says what, where and how; also a gate that fails",
    130: "interrupted (Ctrl-C), after a checkpoint if a run was in progress",
    143: "terminated (SIGTERM), after a checkpoint if a run was in progress",
}
"""Exit statuses of every command."""
