"""Studies: a TOML file → runs → statistics, tables, figures and a page."""
