"""The codec between the contract's values and protobuf: pure functions, both directions for every message.

``encode_*`` makes a message, ``decode_*`` a value. Encoding refuses what the wire type cannot hold with
`ContractError`; decoding accepts every well-formed message, because whether the values make sense is for the session to
judge.
"""

from slidingserve.contract.codec.decode import (
    decode_decide_request,
    decode_decide_response,
    decode_request,
    decode_response,
)
from slidingserve.contract.codec.encode import (
    encode_decide_request,
    encode_decide_response,
    encode_request,
    encode_response,
)
from slidingserve.contract.codec.errors import ContractError

__all__ = [
    "ContractError",
    "decode_decide_request",
    "decode_decide_response",
    "decode_request",
    "decode_response",
    "encode_decide_request",
    "encode_decide_response",
    "encode_request",
    "encode_response",
]
