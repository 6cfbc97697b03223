//! Fronts for other vendors' clients: their protocol, our engine.
//!
//! A front here translates and decides nothing of its own. What the engine cannot do is refused with
//! an error that says so; it is never accepted and ignored. `docs/compat/` has a page for each.

pub(crate) mod vercel;
