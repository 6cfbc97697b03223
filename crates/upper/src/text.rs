//! Paths as text.

/// Bytes as text that can be turned back: what is not printable UTF-8, and `%`, becomes `%XX`.
#[must_use]
pub fn path_text(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for char in chunk.valid().chars() {
            if char == '%' || char.is_control() {
                let mut buffer = [0; 4];
                for byte in char.encode_utf8(&mut buffer).bytes() {
                    text.push_str(&format!("%{byte:02X}"));
                }
            } else {
                text.push(char);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}
