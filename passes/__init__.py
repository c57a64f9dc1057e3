"""What may be done to a model: one file a pass. Imported as `autotune.passes`."""

if __name__ != "autotune.passes":
    raise ImportError(f"import autotune.passes, not {__name__}: a second copy would hold a second registry")
