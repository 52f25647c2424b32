"""The commands: their arguments and what each does, a line each."""

VERBS = {
    "recipes": ("", "lists the recipes, a line each"),
    "config": ("RECIPE [--flags]", "prints the resolved configuration as YAML"),
    "generate": ("OUT --rows N", "writes a synthetic click log with a planted truth, and truth.json beside it"),
    "vocabulary": ("PATH --out DIR", "one pass over a click log -> the Preprocessor (schema, constants, vocabularies)"),
    "preprocess": ("PATH --out DIR --format F", "writes a log as parquet, npy, binary or npz, ready-made; text as mds"),
    "validate": ("PATH", "reports on a log: faults, missing values, categories, drift; exit 2 where a gate fails"),
    "fetch": ("NAME --out DIR", "downloads a published data set, resuming and checking each file"),
    "plan": ("RECIPE [--flags]", "shows how a recipe's tables are spread over its workers, and whether they fit"),
    "train": ("RECIPE [--flags] [-v|-q]", "trains; the same storage and name again goes on where the run stopped"),
    "supervise": ("-- train RECIPE [--flags]", "trains as a job of a cluster, and goes on when its head was lost"),
    "evaluate": ("CHECKPOINT PATH", "scores every labelled row exactly once -> metrics as JSON"),
    "predict": ("CHECKPOINT PATH --out DIR", "writes predictions as Parquet, in input order, with the row's number"),
    "export": ("CHECKPOINT --out DIR", "writes a trained model as other tools read it"),
    "report": ("RUN [RUN ...]", "writes what a run's events tell as one HTML file: metrics, curves, times, failures; or several"),
    "benchmark": ("NAME", "measures, as ratios against a peer or a ceiling in the same run"),
    "doctor": ("[--json]", "what is installed, what fits together, what does not and how to mend it"),
}
