"""The parameter server: a store of keys and values that workers share, on servers that a scheduler brings together."""
