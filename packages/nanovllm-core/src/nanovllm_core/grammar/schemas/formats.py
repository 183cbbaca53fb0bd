"""Defines one regex for each string format that the engine enforces, such as `date`."""

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HOST_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = r"[0-9A-Fa-f]"
_EMAIL_CHAR = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# RFC 3986: unreserved characters, sub-delimiters, ":" and "@", and percent-encoded bytes.
_URI_CHARS = r"A-Za-z0-9._~!$&'()*+,;=:@-"
_URI_BYTE = rf"%{_HEX}{{2}}"
_DURATION_TIME = r"(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE = r"(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_IPV6 = "|".join(
    [
        rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
        *(rf"(?:{_HEX}{{1,4}}:){{1,{8 - n}}}(?::{_HEX}{{1,4}}){{1,{n - 1}}}" for n in range(2, 8)),
        rf"(?:{_HEX}{{1,4}}:){{1,7}}:",
        rf":(?:(?::{_HEX}{{1,4}}){{1,7}}|:)",
    ]
)

# Sources: RFC 3339 (with ISO 8601 durations), 4122, 2673, 4291, 1123, 5321 and 3986.
FORMATS: dict[str, str] = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_DURATION_DATE}(?:T{_DURATION_TIME})?|T{_DURATION_TIME}|[0-9]{{1,9}}W)$",
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": rf"^(?:{_IPV6})$",
    "hostname": rf"^{_HOST_LABEL}(?:\.{_HOST_LABEL}){{0,3}}$",
    "email": rf"^{_EMAIL_CHAR}{{1,30}}(?:\.{_EMAIL_CHAR}{{1,30}}){{0,4}}@{_HOST_LABEL}(?:\.{_HOST_LABEL}){{1,3}}$",
    # Everything between the scheme and "#" is a path and a query. Few repetitions compile fast, see `_shorten_format`.
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]{{0,31}}:(?://)?(?:[{_URI_CHARS}]|{_URI_BYTE})"
    rf"(?:[/?{_URI_CHARS}]|{_URI_BYTE})*(?:#(?:[/?{_URI_CHARS}]|{_URI_BYTE})*)?$",
}
