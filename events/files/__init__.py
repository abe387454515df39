"""Files that are ours alone, whoever else may write where they lie."""
