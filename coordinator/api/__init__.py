"""The dialects that clients speak: one pure module per API family, their table, and the routes over all of them."""
