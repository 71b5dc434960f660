"""The contract without gRPC: its messages as values (`values`) and the codec between them and protobuf (`codec`)."""
