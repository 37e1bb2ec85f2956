"""What people see: pages, pictures, tables, graphs and progress, made from plain data."""
