"""How the database of this service came to have its tables: one step a file in `versions`, never changed afterwards."""
