"""What benchmarks/faults.py is made of: the project, the strikes, the witness, the checks. Nothing else imports it."""
