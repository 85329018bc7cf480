"""Object stores: paths of objects, and leases."""
