"""The command line, and the launcher that starts one process per rank through torchrun's elastic agent."""
