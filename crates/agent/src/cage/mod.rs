//! Builds the cage a sandbox lives in.
