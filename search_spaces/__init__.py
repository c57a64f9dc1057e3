"""What may vary: parameters, conditions, chains of slots. Imported as `autotune.search_spaces`."""

if __name__ != "autotune.search_spaces":
    raise ImportError(f"import autotune.search_spaces, not {__name__}: a second copy would have its own INVALID and INACTIVE")
