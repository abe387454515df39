"""What an engine calls of a manager: what changes running sequences, and what only reads."""
