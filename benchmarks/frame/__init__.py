"""What all questions share: how something is counted, kept, compared, and shown."""
