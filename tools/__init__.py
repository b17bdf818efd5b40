"""Programs for developers: they write parts of the repository from other parts, or measure how good the tests are."""
