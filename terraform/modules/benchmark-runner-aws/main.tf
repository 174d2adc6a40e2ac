data "aws_ssm_parameter" "image" {
  name = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-${var.architecture}"
}

resource "aws_iam_instance_profile" "this" {
  name = var.name
  role = var.role_name
  tags = var.tags
}

resource "aws_security_group" "this" {
  name        = var.name
  description = "Out to S3, the package index and the source; nothing in."
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "HTTPS"
  cidr_ipv4         = "0.0.0.0/0"
  from_port         = 443
  to_port           = 443
  ip_protocol       = "tcp"
}

resource "aws_instance" "this" {
  ami                                  = data.aws_ssm_parameter.image.value
  instance_type                        = var.instance_type
  subnet_id                            = var.subnet_id
  vpc_security_group_ids               = [aws_security_group.this.id]
  iam_instance_profile                 = aws_iam_instance_profile.this.name
  associate_public_ip_address          = false
  instance_initiated_shutdown_behavior = "terminate"
  ebs_optimized                        = true
  monitoring                           = true
  user_data                            = local.user_data
  user_data_replace_on_change          = true
  tags                                 = merge(var.tags, { Name = var.name })

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    encrypted   = true
    volume_type = "gp3"
    volume_size = 30
  }
}
