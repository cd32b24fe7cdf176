"""``pdmesh verify``: checks on a running mesh that moved answers are the answers."""
