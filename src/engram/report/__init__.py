"""One self-contained HTML page: text, tables and figures, nothing loaded from elsewhere."""
