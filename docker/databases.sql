-- PostgreSQL runs this once, when its volume is new; the database of Prefect is POSTGRES_DB.
CREATE DATABASE mlflow;
