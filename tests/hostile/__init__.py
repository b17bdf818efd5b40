"""A campaign of bad input: every kind of file and argument is mutated, and every command has to refuse it in order.

`mutate` draws the mutations, `cases` puts them into folders and command lines, `judge` runs one and looks at what it
left behind: its status, what it said, how long it took, and whether its inputs are still what they were.
"""
