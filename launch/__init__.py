"""The command-line programs, each a thin layer over the library: generate, train_predictors."""
