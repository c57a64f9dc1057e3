"""What a trial measures: latency, accuracy, memory. Imported as `autotune.benchmarks`."""

if __name__ != "autotune.benchmarks":
    raise ImportError(f"import autotune.benchmarks, not {__name__}")
