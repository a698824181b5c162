"""A report for the terminal, as a page, as Markdown and for programs."""
