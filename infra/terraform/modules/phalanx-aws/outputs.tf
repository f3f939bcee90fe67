output "cluster_name" {
  description = "Name of the EKS cluster: `aws eks update-kubeconfig --name NAME`."
  value       = aws_eks_cluster.this.name
}

output "storage_url" {
  description = "The services' `storage`: the registry of jobs, dataset versions and pins."
  value       = "s3://${aws_s3_bucket.this["data"].bucket}"
}

output "datasets_url" {
  description = "Where `phalanx data prepare --out` puts datasets: one folder each below it."
  value       = "s3://${aws_s3_bucket.this["data"].bucket}/datasets"
}

output "job_storage_url" {
  description = "`[job] storage` of job files."
  value       = "s3://${aws_s3_bucket.this["checkpoints"].bucket}"
}

output "service_role_arns" {
  description = "Role by service, for the annotation eks.amazonaws.com/role-arn of its service account."
  value       = { for name, role in aws_iam_role.service : name => role.arn }
}

output "rank_role_arns" {
  description = "Role by rank scope, for the annotation eks.amazonaws.com/role-arn of its service account."
  value       = { for name, role in aws_iam_role.ranks : name => role.arn }
}

output "image_repositories" {
  description = "Repository by image (services, agent): where to push what compose/Dockerfile builds."
  value       = { for name, repository in aws_ecr_repository.this : name => repository.repository_url }
}

output "efa_interfaces_per_node" {
  description = "What a pod that takes a whole GPU node asks for as vpc.amazonaws.com/efa."
  value       = local.num_network_cards
}

output "gpu_subnet_id" {
  description = "Subnet of the GPU nodes, for what must be near them (a file system)."
  value       = aws_subnet.gpu.id
}

output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}
