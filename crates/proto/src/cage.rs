//! What the container driver tells `keep-agent` to build.
