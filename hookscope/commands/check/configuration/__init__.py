"""Read the configuration of `hookscope check`: TOML to `CheckSettings`, every mistake with file and line."""
