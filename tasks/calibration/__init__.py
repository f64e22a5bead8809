"""Times the stages of a run on this machine, so that plans are right for it."""
